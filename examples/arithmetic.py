"""Two-digit addition by asynchronous GRPO: a model that gets a third right learns to get nearly all.

Run it with ``make demo``; options after ``--help``. Rollout and training run at the same time on separate processes,
and no token is trained on more than ``--max-staleness`` versions after it was sampled.

Departures from the papers: whole groups are the unit of data (StaleFlow's trajectories, GRPO's groups); one
optimizer update per batch; no KL penalty and no reference model; groups of equal rewards are kept, so that a batch
costs the same from start to end.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

import staleflow
from staleflow.engines.base import Engine
from staleflow.trainer.loss_settings import BY_NAME

if TYPE_CHECKING:
    from warm_start import Problem

EVALUATE_EVERY_STEPS = 100
LOOP_LAG_LIMIT_MS = 10.0
MAX_ANSWER_TOKENS = 5


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What ``verdict.json`` holds; ``shortfalls`` says in words why the run did not pass.

    It is of the whole run, however often that was resumed; only the loop lag is of the last process. ``wall_s``
    includes the warm start; of a resumed run it is the time of its history, without what each resume has cut off.
    """

    passed: bool
    shortfalls: list[str]
    accuracy_before: float
    accuracy_after: float
    held_out_failures: int
    wall_s: float
    steps: int
    max_staleness: int
    staleness_max: int
    staleness_mean: float
    staleness_histogram: dict[int, int]
    stale_trajectories: int
    trained_trajectories: int
    trainer_wait_s: float
    rollout_wait_s: float
    loop_lag_p99_ms: float
    accounting: staleflow.Accounting


async def rollout(problem: "Problem", llm: staleflow.LLM) -> float:
    """One answer; it is right or it is not."""
    answer = await llm.generate(problem.prompt, max_new_tokens=MAX_ANSWER_TOKENS)
    return float(answer.text == problem.answer and answer.finish_reason == "stop")


def main() -> int:
    """Warm-start, train, judge; returns the exit code."""
    started_s = time.monotonic()
    options = _options()
    config = staleflow.Config(
        steps=options.steps,
        batch_size=64,
        group_size=4,
        max_staleness=options.max_staleness,
        evaluate_every_steps=EVALUATE_EVERY_STEPS,
        checkpoint_every_steps=options.checkpoint_every_steps,
    )
    # Imported here because it imports torch, which takes seconds in which Ctrl-C should work as in all others.
    from warm_start import problems, warm_started_model

    train, held_out = problems(options.seed)
    model = warm_started_model(Path(".cache"), seed=options.seed)
    pipeline = staleflow.Pipeline(
        tasks=staleflow.ListTasks(train, seed=options.seed),
        rollout=rollout,
        engines=_engines(options, model),
        trainer=staleflow.LocalTrainer(
            model,
            loss=options.loss,
            learning_rate=options.learning_rate,
            warmup_steps=10,
            decay_steps=options.steps,
            ranks=options.trainer_ranks,
        ),
        config=config,
        held_out=held_out,
        run_dir=options.run_dir,
        resume=options.resume,
    )
    report = staleflow.run(pipeline)
    wall_s = time.monotonic() - started_s if options.resume is None else report.wall_s
    # Two servers, each of several processes, take turns with the controller on whatever cores there are.
    lag_limit_ms = LOOP_LAG_LIMIT_MS if options.engine == "embedded" else math.inf
    verdict = judge(report, options.max_staleness, wall_s, lag_limit_ms)
    path = Path(report.run_dir) / "verdict.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(verdict), indent=2))
    _show(verdict, path)
    return 0 if verdict.passed else 1


def judge(
    report: staleflow.Report, max_staleness: int, wall_s: float, lag_limit_ms: float = LOOP_LAG_LIMIT_MS
) -> Verdict:
    """Hold a run against what the demo promises."""
    before, after = report.accuracy_before or 0.0, report.accuracy_after or 0.0
    promises = {
        f"accuracy before is {before:.3f}, not at most 0.50: nothing was left to learn": before <= 0.5,
        f"accuracy after is {after:.3f}, not at least 0.90": after >= 0.9,
        f"staleness reached {report.staleness_max}, above {max_staleness}": report.staleness_max <= max_staleness,
        "no trajectory was stale, so nothing was asynchronous": max_staleness == 0 or report.stale_trajectories > 0,
        "the accounting law does not hold": report.accounting.holds,
        f"event-loop lag p99 is {report.loop_lag_p99_ms:.1f} ms, not under {lag_limit_ms:.0f} ms": (
            report.loop_lag_p99_ms < lag_limit_ms
        ),
    }
    shortfalls = [shortfall for shortfall, kept in promises.items() if not kept]
    return Verdict(
        passed=not shortfalls,
        shortfalls=shortfalls,
        accuracy_before=before,
        accuracy_after=after,
        held_out_failures=report.held_out_failures,
        wall_s=wall_s,
        steps=report.steps,
        max_staleness=max_staleness,
        staleness_max=report.staleness_max,
        staleness_mean=report.staleness_mean,
        staleness_histogram=report.staleness_histogram,
        stale_trajectories=report.stale_trajectories,
        trained_trajectories=report.trained_trajectories,
        trainer_wait_s=report.trainer_wait_s,
        rollout_wait_s=report.rollout_wait_s,
        loop_lag_p99_ms=report.loop_lag_p99_ms,
        accounting=report.accounting,
    )


def _engines(options: argparse.Namespace, model: Path) -> Sequence[Engine]:
    if options.engine == "embedded":
        return [staleflow.EmbeddedEngine(model, seed=options.seed)]
    return staleflow.launch_vllm(model, 2, seed=options.seed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small model on two-digit addition by asynchronous GRPO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--max-staleness", type=int, default=2, help="hard bound in versions; 0 is synchronous")
    parser.add_argument("--steps", type=int, default=900, help="train steps")
    parser.add_argument("--seed", type=int, default=1, help="of the model, the split, the order of tasks, the sampler")
    parser.add_argument(
        "--engine",
        choices=["embedded", "vllm"],
        default="embedded",
        help="what generates: a child, or two vLLM servers",
    )
    parser.add_argument("--loss", choices=sorted(BY_NAME), default="decoupled_ppo")
    parser.add_argument("--learning-rate", type=float, default=7e-4, help="at the first step; falls to a tenth")
    parser.add_argument("--trainer-ranks", type=int, default=1, help="processes that train together")
    parser.add_argument("--run-dir", type=Path, default=None, help="run folder (default: runs/<local time>)")
    parser.add_argument("--checkpoint-every-steps", type=int, help="save a checkpoint to resume from, this often")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with this run folder; give the same options as when it began"
    )
    return parser.parse_args()


def _show(verdict: Verdict, path: Path) -> None:
    accounting = verdict.accounting
    tokens = sum(verdict.staleness_histogram.values())
    table = Table(title="passed" if verdict.passed else "not passed", show_header=False)
    table.add_row("accuracy, held out", f"{verdict.accuracy_before:.3f} -> {verdict.accuracy_after:.3f}")
    table.add_row("wall time", f"{verdict.wall_s:.0f} s for {verdict.steps} steps")
    table.add_row("staleness", f"mean {verdict.staleness_mean:.2f}, max {verdict.staleness_max} versions")
    for gap, count in verdict.staleness_histogram.items():
        table.add_row(f"  {gap} versions", f"{'█' * round(30 * count / tokens)} {count / tokens:.1%} of tokens")
    table.add_row("waiting", f"trainer {verdict.trainer_wait_s:.0f} s, rollout {verdict.rollout_wait_s:.0f} s")
    table.add_row("loop lag p99", f"{verdict.loop_lag_p99_ms:.1f} ms")
    table.add_row(
        "accounting law",
        f"{accounting.admitted} admitted = {accounting.trained} trained + {sum(accounting.filtered.values())} filtered"
        f" + {sum(accounting.aborted.values())} aborted + {accounting.expired} expired + {accounting.running} running"
        f" + {accounting.complete} complete + {accounting.leased} leased: {'holds' if accounting.holds else 'BROKEN'}",
    )
    table.add_row("run folder", str(path.parent))
    console = Console()
    console.print(table)
    for shortfall in verdict.shortfalls:
        console.print(f"[red]{shortfall}[/red]")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
