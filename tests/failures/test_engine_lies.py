"""An engine fails a call or answers nonsense: refused at the door, and only that trajectory pays."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import Scripted

from staleflow import Config
from staleflow.errors import EngineError, TooManyFailuresError
from staleflow.events import Synced
from staleflow.testing import ScriptedEngine
from staleflow.types import GenerateRequest, Generation

LIES: dict[str, dict[str, Any]] = {
    "fewer logprobs than tokens": {"logprobs": []},
    "version from the future": {"versions": [10_000]},
    "logprob nan": {"logprobs": [float("nan")]},
    "answer to another request": {"request_id": "9.9.9.9"},
}


class Liar(ScriptedEngine):
    """Lies in every fourth answer."""

    def __init__(self, lie: dict[str, Any]) -> None:
        super().__init__(lambda request, rng: [1])
        self.lie = lie

    async def generate(self, request: GenerateRequest) -> Generation:
        lies = len(self.requests) % 4 == 0
        truth = await super().generate(request)
        return msgspec.structs.replace(truth, **self.lie) if lies else truth


@pytest.mark.parametrize("lie", LIES)
def test_H8_malformed_reply_fails_its_trajectory(scripted: Scripted, lie: str) -> None:
    run = scripted(Config(steps=4, batch_size=4, group_size=2), engines=[Liar(LIES[lie])])
    report = run.run()
    assert report.accounting.failed_attempts["EngineReplyError"] > 3
    assert all(t.sampled_tokens == len(t.versions) == 1 for batch in run.trainer.batches for t in batch.trajectories)


def test_H8_engine_that_fails_every_call_is_an_error_end_to_end(scripted: Scripted) -> None:
    class OutOfMemory(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            raise EngineError("out of memory")

    run = scripted(Config(steps=4, batch_size=4, group_size=2), engines=[OutOfMemory()])
    assert str(run.fail(TooManyFailuresError).__cause__) == "out of memory"


def test_H10_dead_engine_cancels_the_whole_run(scripted: Scripted) -> None:
    class Dies(ScriptedEngine):
        async def run(self) -> None:
            await asyncio.sleep(1.5)
            raise EngineError("engine-0 was ended by SIGKILL")

    run = scripted(Config(steps=1000, batch_size=2, group_size=2, engine_restarts=0), engines=[Dies()])
    assert str(run.fail(EngineError)) == "engine-0 was ended by SIGKILL"
    assert run.trainer.saved == [run.run_dir / "checkpoint"]
    assert run.events()[-1].t < 3


def test_H9_engine_that_cannot_start_ends_the_run_at_once(scripted: Scripted) -> None:
    class CannotStart(ScriptedEngine):
        async def start(self, name: str, log_folder: Path) -> None:
            raise EngineError(f"{name} exited with code 1")

    run = scripted(Config(steps=2, batch_size=2, group_size=2, engine_restarts=0), engines=[CannotStart()])
    assert str(run.fail(EngineError)) == "engine-0 exited with code 1"
    assert run.trainer.saved == []
    assert run.events()[-1].t == 0


@pytest.mark.parametrize("confirms", [None, -1, 1])
def test_V11_engine_that_does_not_confirm_the_new_version_ends_the_run(
    scripted: Scripted, confirms: int | None
) -> None:
    class CannotUpdate(ScriptedEngine):
        async def update_weights(self, version: int, weights: Path) -> int:
            if version < 2:
                return await super().update_weights(version, weights)
            if confirms is None:
                raise EngineError("update failed")
            return version + confirms

    run = scripted(Config(steps=9, batch_size=2, group_size=2, engine_restarts=0), engines=[CannotUpdate()])
    assert ("update failed" if confirms is None else "confirmed version") in str(run.fail(EngineError))
    assert [event.version for event in run.events_of(Synced)] == [1]
