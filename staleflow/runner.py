"""Run a pipeline from ordinary code: an event loop, and signals as a user expects them."""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from staleflow.checkpoints import newest_step
from staleflow.pipeline import Pipeline
from staleflow.statistics import Report
from staleflow.types import TaskData

LEFTOVER_GRACE_S = 1.0

logger = logging.getLogger("staleflow")


def run(pipeline: Pipeline[TaskData]) -> Report:
    """Run ``pipeline`` to its end on a new event loop (uvloop's where it is installed) and return its report.

    Ctrl-C and SIGTERM end the run in order, with the model saved if a step was trained and a checkpoint to resume from
    if the run saves any, and raise ``SystemExit(130)`` or ``SystemExit(143)``. A second one does not wait for that.
    What a rollout function has left running is cancelled, named in a warning if it goes on all the same, and not waited
    for. Inside a running event loop, await :meth:`Pipeline.run` instead.
    """
    # What was imported before the run lives as long as the process; a full collection that walks all of it (torch,
    # say) would stop the event loop for a tenth of a second.
    gc.collect()
    gc.freeze()
    # Not a context manager: leaving it would wait without limit for every task and thread that is left.
    runner = asyncio.Runner(loop_factory=loop_factory())
    signals: list[int] = []
    threads = set(threading.enumerate())
    try:
        return runner.run(_bounded(pipeline, signals))
    except KeyboardInterrupt:
        code = 130
    except asyncio.CancelledError:
        if not signals:
            raise
        code = 143
    finally:
        runner.get_loop().close()
        gc.unfreeze()
        hung = _hung_threads(threads)
    checkpoint = pipeline.run_dir / "checkpoint"
    saved = f"the checkpoint is {checkpoint}" if checkpoint.exists() else "there is no checkpoint"
    step = newest_step(pipeline.run_dir)
    resume = "" if step is None else f"; resume={str(pipeline.run_dir)!r} goes on after step {step}"
    print(f"\nInterrupted; {saved}{resume}", file=sys.stderr)
    if hung:
        # The interpreter would wait for them at its exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _hung_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads begun in the run that the interpreter would wait for, with a warning: a thread cannot be cancelled."""
    begun = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    until = time.monotonic() + LEFTOVER_GRACE_S
    for thread in begun:
        thread.join(max(0.0, until - time.monotonic()))
    hung = [thread for thread in begun if thread.is_alive()]
    if hung:
        logger.warning(
            "%d threads begun by rollout functions still run; Python does not exit before they end", len(hung)
        )
    return hung


async def _bounded(pipeline: Pipeline[TaskData], signals: list[int]) -> Report:
    run = asyncio.current_task()
    if threading.current_thread() is threading.main_thread() and run is not None:

        def terminate() -> None:
            signals.append(signal.SIGTERM)
            run.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await pipeline.run()
    finally:
        leftovers = asyncio.all_tasks() - {asyncio.current_task()}
        for task in leftovers:
            task.cancel()
        if leftovers:
            _, running = await asyncio.wait(leftovers, timeout=LEFTOVER_GRACE_S)
            for task in running:
                logger.warning("abandoned a task that ignores its cancellation: %r", task)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """How :func:`run` makes its event loop; None stands for asyncio's own way."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
