import asyncio
import re
from io import StringIO

import pytest
from rich.console import Console

from staleflow import view
from staleflow.statistics import EvaluationProgress, FleetStatistics, PipelineStatistics
from staleflow.testing import run_virtually

# No two figures alike, so that none can stand in for another.
NOW = PipelineStatistics(
    phase="training",
    step=17,
    steps=230,
    elapsed_s=341.0,
    reward_mean=0.625,
    accuracy=0.875,
    staleness_mean=1.26,
    staleness_max=3,
    trainer_wait_share=0.11,
    rollout_wait_share=0.22,
    tokens_per_s=54_321.0,
    live_groups=41,
    running_requests=73,
    waiting_requests=19,
    failed_attempts=28,
    loop_lag_p99_ms=6.5,
    fleet=FleetStatistics(serving=5, deaths=9, restarts=8, retired=1, interrupted={}, discarded_tokens=0),
    accuracy_version=12,
    evaluation=EvaluationProgress(version=16, tasks=48, played=9, failed=2),
    skipped_updates=5,
)
NO_FLEET = FleetStatistics(serving=0, deaths=0, restarts=0, retired=0, interrupted={}, discarded_tokens=0)
UNKNOWN = PipelineStatistics("starting", 0, 230, 0.0, None, None, 0.0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0.0, NO_FLEET)


def shown(monkeypatch: pytest.MonkeyPatch, now: PipelineStatistics, *, terminal: bool, for_s: float = 0.1) -> str:
    """What is on the screen after ``for_s`` virtual seconds."""
    screen = StringIO()
    monkeypatch.setattr(
        view, "Console", lambda: Console(file=screen, force_terminal=terminal, width=80, color_system=None, _environ={})
    )

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(for_s):
                await view.show(lambda: now)

    run_virtually(main())
    return screen.getvalue()


def rows(screen: str) -> dict[str, str]:
    cells = (re.split("[│┃|]", line) for line in screen.splitlines())
    return {name.strip(): value.strip() for _, name, value, _ in (cell for cell in cells if len(cell) == 4)}


def test_table_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown(monkeypatch, NOW, terminal=True)
    assert "training · 341 s" in screen
    assert rows(screen) == {
        "step": "17 of 230",
        "reward": "0.625 (recent batches)",
        "accuracy": "0.875 (held out, version 12)",
        "evaluation": "version 16: 9 of 48 played, 2 failed",
        "staleness": "1.26 mean, 3 max",
        "waiting": "trainer 11% of its time, rollout 22%",
        "tokens/s": "54,321 trained",
        "live groups": "41",
        "requests": "73 running, 19 waiting",
        "engines": "5 serving, 9 deaths, 1 given up",
        "failed attempts": "28",
        "skipped updates": "5",
        "loop lag p99": "6.5 ms",
    }


def test_what_is_not_known_yet_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows(shown(monkeypatch, UNKNOWN, terminal=True))
    assert (table["reward"], table["accuracy"]) == ("– (recent batches)", "– (held out)")
    assert (table["evaluation"], table["skipped updates"]) == ("–", "0")
    [line] = shown(monkeypatch, UNKNOWN, terminal=False).splitlines()
    assert "reward –  accuracy –" in line


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown(monkeypatch, NOW, terminal=False, for_s=2.5 * view.LINE_EVERY_S)
    line = (
        " 341.0 s  training  step 17/230  reward 0.625  accuracy 0.875  "
        "evaluating version 16: 9 of 48 played, 2 failed  staleness 1.26/3  54321 tokens/s"
    )
    assert screen.splitlines() == [line] * 3, "whole lines, however narrow the console, and nothing else"
