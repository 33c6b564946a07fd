"""Several things go wrong at once: the caller sees the one that came first, and every part is still stopped."""

import asyncio
from pathlib import Path

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config
from staleflow.errors import EngineError, TrainerError
from staleflow.events import Released
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import StepMetrics, TrainBatch

CONFIG = Config(steps=9, batch_size=2, group_size=2)


class FailsAtStep2(ScriptedTrainer):
    async def step(self, batch: TrainBatch) -> StepMetrics:
        if batch.step == 2:
            raise TrainerError("step 2: loss nan")
        return await super().step(batch)


def test_step_that_raises_gives_its_batch_back(scripted: Scripted) -> None:
    run = scripted(CONFIG, trainer=FailsAtStep2())
    assert str(run.fail(TrainerError)) == "step 2: loss nan"
    assert [event.batch for event in run.events_of(Released)] == [2]
    assert run.trainer.saved == [run.run_dir / "checkpoint"]


def test_engine_that_fails_while_it_is_cancelled(scripted: Scripted) -> None:
    class FailsToEnd(ScriptedEngine):
        async def run(self) -> None:
            try:
                await super().run()
            finally:
                raise EngineError("lost the connection while ending")

    assert (
        str(scripted(CONFIG, trainer=FailsAtStep2(), engines=[FailsToEnd()]).fail(TrainerError)) == "step 2: loss nan"
    )


def test_rollout_that_fails_while_it_is_cancelled(scripted: Scripted) -> None:
    async def fails_to_end(task: int, llm: LLM) -> float:
        try:
            await asyncio.sleep(0.1)
            return await one_turn(task, llm)
        except asyncio.CancelledError:
            raise ValueError("cleaning up failed") from None

    assert str(scripted(CONFIG, trainer=FailsAtStep2(), rollout=fails_to_end).fail(TrainerError)) == "step 2: loss nan"


@pytest.mark.parametrize("error", [TrainerError("disk full"), OSError("disk full"), RuntimeError("disk full")])
def test_checkpoint_that_cannot_be_saved(scripted: Scripted, error: Exception) -> None:
    class CannotSave(FailsAtStep2):
        async def save(self, folder: Path) -> None:
            raise error

    assert str(scripted(CONFIG, trainer=CannotSave()).fail(TrainerError)) == "step 2: loss nan"


@pytest.mark.parametrize(
    ("error", "reason"), [(TrainerError("disk full"), "disk full"), (ConnectionResetError(), "ConnectionResetError")]
)
def test_checkpoint_that_cannot_be_saved_is_warned_of(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    """Its error gives way to the first one, so nothing else would say that the checkpoint is missing, and why."""

    class CannotSave(FailsAtStep2):
        async def save(self, folder: Path) -> None:
            raise error

    assert str(scripted(CONFIG, trainer=CannotSave()).fail(TrainerError)) == "step 2: loss nan"
    [record] = [record for record in caplog.records if record.name == "staleflow"]
    assert (record.levelname, record.getMessage()) == ("WARNING", f"no checkpoint could be saved: {reason}")


def test_trainer_that_hangs_while_it_saves(scripted: Scripted) -> None:
    class HangsInSave(FailsAtStep2):
        async def save(self, folder: Path) -> None:
            await asyncio.Event().wait()

    assert str(scripted(CONFIG, trainer=HangsInSave()).fail(TrainerError)) == "step 2: loss nan"


def test_engine_that_cannot_be_stopped(scripted: Scripted) -> None:
    class CannotStop(ScriptedEngine):
        async def stop(self) -> None:
            await super().stop()
            raise EngineError("no such process")

    class StopsSlowly(ScriptedTrainer):
        async def stop(self) -> None:
            await asyncio.sleep(3)
            await super().stop()

    class FailsAndStopsSlowly(FailsAtStep2, StopsSlowly):
        pass

    engines = [CannotStop(), ScriptedEngine()]
    assert (
        str(scripted(CONFIG, trainer=FailsAndStopsSlowly(), engines=engines).fail(TrainerError)) == "step 2: loss nan"
    )
    # After a good run it is the first error, and no reason to leave the trainer running.
    engines = [CannotStop(), ScriptedEngine()]
    assert str(scripted(CONFIG, trainer=StopsSlowly(), engines=engines).fail(EngineError)) == "no such process"


def test_final_checkpoint_that_cannot_be_saved_is_an_error(scripted: Scripted) -> None:
    class CannotSave(ScriptedTrainer):
        async def save(self, folder: Path) -> None:
            raise TrainerError("disk full")

    assert str(scripted(CONFIG, trainer=CannotSave()).fail(TrainerError)) == "disk full"
