"""Run a pipeline from ordinary code: an event loop, and Ctrl-C as a user expects it."""

import asyncio
import gc
import sys
from collections.abc import Callable

from staleflow.pipeline import Pipeline
from staleflow.statistics import Report
from staleflow.types import TaskData


def run(pipeline: Pipeline[TaskData]) -> Report:
    """Run ``pipeline`` to its end on a new event loop (uvloop's where it is installed) and return its report.

    Ctrl-C ends the run in order, with a checkpoint if a step was trained, and raises ``SystemExit(130)``. A second
    Ctrl-C does not wait for that. Inside a running event loop, await :meth:`Pipeline.run` instead.
    """
    # What was imported before the run lives as long as the process; a full collection that walks all of it (torch,
    # say) would stop the event loop for a tenth of a second.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(pipeline.run())
    except KeyboardInterrupt:
        checkpoint = pipeline.run_dir / "checkpoint"
        saved = f"the checkpoint is {checkpoint}" if checkpoint.exists() else "there is no checkpoint"
        print(f"\nInterrupted; {saved}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        gc.unfreeze()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
