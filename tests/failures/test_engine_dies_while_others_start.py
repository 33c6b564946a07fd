"""An engine dies while another part of the run still loads its model: nobody waits for that one to notice."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from support import Scripted, virtually

from staleflow import Config
from staleflow.errors import EngineError
from staleflow.events import EngineDied, EngineRetired
from staleflow.testing import ScriptedEngine, ScriptedTrainer

CONFIG = Config(steps=3, batch_size=2, group_size=2)
LOADING_S = 290.0


class Dies(ScriptedEngine):
    async def run(self) -> None:
        await asyncio.sleep(1.0)
        raise EngineError("engine-0 was ended by SIGKILL")


class StartsSlowly(ScriptedEngine):
    async def start(self, name: str, log_folder: Path) -> None:
        await asyncio.sleep(LOADING_S)


class TrainerStartsSlowly(ScriptedTrainer):
    async def start(self, log_folder: Path) -> None:
        await asyncio.sleep(LOADING_S)


def test_H9_death_of_the_only_engine_while_the_trainer_starts_ends_the_run_at_once(scripted: Scripted) -> None:
    config = msgspec.structs.replace(CONFIG, engine_restarts=0)
    run = scripted(config, engines=[Dies()], trainer=TrainerStartsSlowly())

    async def main() -> float:
        with pytest.raises(EngineError, match="engine-0 was ended by SIGKILL"):
            await run.pipeline.run()
        return asyncio.get_running_loop().time()

    assert virtually(main()) == pytest.approx(1.0)
    run.check_wound_down()
    assert run.trainer.saved == []


def test_H9_death_while_another_engine_starts_is_noticed_at_once(scripted: Scripted) -> None:
    run = scripted(CONFIG, engines=[Dies(), StartsSlowly()])
    run.run()
    deaths = [event.t for event in run.events_of(EngineDied)]
    # After pauses of 1, 2 and 4 s.
    assert deaths == pytest.approx([1.0, 3.0, 6.0, 11.0])
    assert [event.engine for event in run.events_of(EngineRetired)] == [0]
