"""Ctrl-C in the middle: a checkpoint if a step was trained, every part stopped, every group accounted for."""

import asyncio
from pathlib import Path

import pytest
from support import Scripted, ScriptedRun, virtually

from staleflow import Config
from staleflow.events import Aborted, Consumed, PhaseBegan, Published, Released
from staleflow.testing import ScriptedEngine, ScriptedTrainer

CONFIG = Config(steps=100, batch_size=2, group_size=2)


def cancel_after(run: ScriptedRun, seconds: float) -> None:
    async def main() -> None:
        running = asyncio.ensure_future(run.pipeline.run())
        await asyncio.sleep(seconds)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        virtually(main())
    run.check_wound_down()


@pytest.mark.parametrize("after_s", [0.95 + 0.017 * n for n in range(25)])
def test_cancelled_at_any_moment(scripted: Scripted, after_s: float) -> None:
    run = scripted(CONFIG, engines=[ScriptedEngine(seed=1), ScriptedEngine(seed=2, token_s=0.1)])
    cancel_after(run, after_s)
    assert run.trainer.saved == [run.run_dir / "checkpoint"]
    assert len(run.events_of(Consumed)) == len(run.events_of(Published)) + len(run.events_of(Released))
    assert {event.reason for event in run.events_of(Aborted)} <= {"shut_down"}
    assert run.events()[-1].t == pytest.approx(after_s)


def test_cancelled_before_the_first_step_saves_nothing(scripted: Scripted) -> None:
    run = scripted(CONFIG)
    cancel_after(run, 0.1)
    assert run.trainer.saved == []


def test_cancelled_while_starting(scripted: Scripted) -> None:
    class StartsSlowly(ScriptedEngine):
        async def start(self, name: str, log_folder: Path) -> None:
            await asyncio.sleep(60)

    run = scripted(CONFIG, engines=[ScriptedEngine(), StartsSlowly()])
    cancel_after(run, 1.0)
    assert run.trainer.saved == []
    assert run.events() == [PhaseBegan(0.0, "starting")]


def test_cancelled_while_the_last_checkpoint_is_saved(scripted: Scripted) -> None:
    class SavesSlowly(ScriptedTrainer):
        async def save(self, folder: Path) -> None:
            await asyncio.sleep(10)
            await super().save(folder)

    run = scripted(Config(steps=2, batch_size=1, group_size=1), trainer=SavesSlowly())
    cancel_after(run, 5.0)
    assert run.trainer.saved == [run.run_dir / "checkpoint"]


def test_cancelled_while_held_out_tasks_are_played(scripted: Scripted) -> None:
    run = scripted(CONFIG, held_out=[1, 2, 3], engines=[ScriptedEngine(token_s=10)])
    cancel_after(run, 1.0)
    assert run.events_of(Consumed) == []


def test_cancelled_twice_does_not_wait_for_the_checkpoint(scripted: Scripted) -> None:
    class NeverSaves(ScriptedTrainer):
        async def save(self, folder: Path) -> None:
            await asyncio.Event().wait()

    run = scripted(CONFIG, trainer=NeverSaves())

    async def main() -> float:
        running = asyncio.ensure_future(run.pipeline.run())
        for _ in range(2):
            await asyncio.sleep(2.0)
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return asyncio.get_running_loop().time()

    assert virtually(main()) == pytest.approx(4.0)
    run.check_wound_down()
