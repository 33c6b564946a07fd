"""What the tests of checkpoints share: runs that are killed and resumed, and the history they have in common."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from support import Replay, ScriptedRun, read_events, virtually

from staleflow import Config, Report, StalenessLedger
from staleflow.events import Admitted
from staleflow.explain import explain, read_run


def killed(run: ScriptedRun, at_s: float, into: Path) -> Report | None:
    """Run until ``at_s`` and put what is then on disk into a folder, as ``kill -9`` would leave it; None if the run had
    ended before, with its report."""

    async def until_killed() -> Report | None:
        life = asyncio.create_task(run.pipeline.run())
        done, _ = await asyncio.wait({life}, timeout=at_s)
        if done:
            return life.result()
        if run.run_dir.exists():
            shutil.copytree(run.run_dir, into)
        # Twice, or it would first save what is lost anyway.
        for _ in range(2):
            life.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({life})
        return None

    return virtually(until_killed())


def whole_checkpoints(run_dir: Path) -> list[int]:
    """The steps of those that a run folder holds."""
    return sorted(int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdecimal())


def check_history(run_dir: Path, config: Config, report: Report) -> Replay:
    """The joined log of all processes against the laws, event by event, and the journal at each of its moments."""
    replay = Replay(config)
    events = read_events(run_dir)
    for event in events:
        replay.apply(event)
    replay.check(report)
    assert [event.task for event in events if isinstance(event, Admitted)] == list(range(len(replay.task)))
    moments = StalenessLedger.replay((run_dir / "ledger.journal").read_bytes())
    for _, ledger in moments:
        assert ledger.statistics().accounting_holds
    assert moments.ledger.statistics().trained == len(replay.trained)
    assert moments.ledger.published == replay.published == report.steps
    check_explanation(run_dir)
    return replay


def check_explanation(run_dir: Path) -> None:
    """What is explained is what was measured, of every step, in whichever process."""
    found = explain(read_run(run_dir))
    waited = {wait.batch: wait.waited_s for wait in found.waits}
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    for record in map(json.loads, lines):
        assert waited.get(record["step"], 0.0) == pytest.approx(record["trainer_wait_s"], abs=0.001)
