"""An engine has started and dies, while another part of the run still loads its model: nobody waits for that one."""

import asyncio
from pathlib import Path

import pytest
from support import Scripted, virtually

from staleflow import Config
from staleflow.errors import EngineError
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


@pytest.mark.parametrize("slow", ["engine", "trainer"])
def test_H9_death_while_others_start_ends_the_run_at_once(scripted: Scripted, slow: str) -> None:
    run = scripted(
        CONFIG,
        engines=[Dies(), StartsSlowly() if slow == "engine" else ScriptedEngine()],
        trainer=TrainerStartsSlowly() if slow == "trainer" else ScriptedTrainer(),
    )

    async def main() -> float:
        with pytest.raises(EngineError, match="engine-0 was ended by SIGKILL"):
            await run.pipeline.run()
        return asyncio.get_running_loop().time()

    assert virtually(main()) == pytest.approx(1.0)
    run.check_wound_down()
    assert run.trainer.saved == []
