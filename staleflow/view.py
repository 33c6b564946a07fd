"""The live view: one table that follows a run, or a line now and then where there is no terminal."""

import asyncio
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table

from staleflow.statistics import PipelineStatistics

REFRESH_S = 1.0
LINE_EVERY_S = 10.0


async def show(statistics: Callable[[], PipelineStatistics]) -> None:
    """Show until cancelled."""
    console = Console()
    if not console.is_terminal:
        await _lines(console, statistics)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_table(statistics()), refresh=True)
            await asyncio.sleep(REFRESH_S)


async def _lines(console: Console, statistics: Callable[[], PipelineStatistics]) -> None:
    while True:
        now = statistics()
        console.print(
            f"{now.elapsed_s:6.1f} s  {now.phase}  step {now.step}/{now.steps}  reward {_figure(now.reward_mean)}  "
            f"accuracy {_figure(now.accuracy)}{_evaluation(now, '  evaluating ')}  "
            f"staleness {now.staleness_mean:.2f}/{now.staleness_max}  "
            f"{now.tokens_per_s:.0f} tokens/s",
            highlight=False,
            soft_wrap=True,
        )
        await asyncio.sleep(LINE_EVERY_S)


def _table(now: PipelineStatistics) -> Table:
    table = Table(title=f"staleflow · {now.phase} · {now.elapsed_s:.0f} s", show_header=False, min_width=60)
    rows = (
        ("step", f"{now.step} of {now.steps}"),
        ("reward", f"{_figure(now.reward_mean)} (recent batches)"),
        ("accuracy", f"{_figure(now.accuracy)} (held out{_version(now)})"),
        ("evaluation", _evaluation(now) or "–"),
        ("staleness", f"{now.staleness_mean:.2f} mean, {now.staleness_max} max"),
        ("waiting", f"trainer {now.trainer_wait_share:.0%} of its time, rollout {now.rollout_wait_share:.0%}"),
        ("tokens/s", f"{now.tokens_per_s:,.0f} trained"),
        ("live groups", f"{now.live_groups}"),
        ("requests", f"{now.running_requests} running, {now.waiting_requests} waiting"),
        ("engines", f"{now.fleet.serving} serving, {now.fleet.deaths} deaths, {now.fleet.retired} given up"),
        ("failed attempts", f"{now.failed_attempts}"),
        ("skipped updates", f"{now.skipped_updates}"),
        ("loop lag p99", f"{now.loop_lag_p99_ms:.1f} ms"),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table


def _version(now: PipelineStatistics) -> str:
    return "" if now.accuracy_version is None else f", version {now.accuracy_version}"


def _evaluation(now: PipelineStatistics, label: str = "") -> str:
    going_on = now.evaluation
    if going_on is None:
        return ""
    failed = f", {going_on.failed} failed" if going_on.failed else ""
    return f"{label}version {going_on.version}: {going_on.played} of {going_on.tasks} played{failed}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
