"""What supervision says about deaths."""

import asyncio

import pytest
from support import Scripted

from staleflow import Config
from staleflow.errors import EngineError, EngineGoneError
from staleflow.events import EngineDied, EngineRetired
from staleflow.supervision import ACCOUNT_TIMEOUT_S
from staleflow.testing import ScriptedEngine
from staleflow.types import GenerateRequest, Generation


@pytest.mark.parametrize(("account_s", "told"), [(3.0, "was ended by SIGKILL"), (60.0, "the connection was reset")])
def test_the_account_of_a_death_is_the_engines_own_if_it_comes_soon(
    scripted: Scripted, account_s: float, told: str
) -> None:
    class Dies(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.reset = asyncio.Event()

        async def generate(self, request: GenerateRequest) -> Generation:
            self.reset.set()
            raise EngineGoneError("the connection was reset")

        async def run(self) -> None:
            await self.reset.wait()
            await asyncio.sleep(account_s)
            raise EngineError("was ended by SIGKILL")

    run = scripted(Config(steps=1, batch_size=1, group_size=1, engine_restarts=0), engines=[Dies()])
    assert told in str(run.fail(EngineError))
    [death] = run.events_of(EngineDied)
    assert death.cause == "the connection was reset"
    [retired] = run.events_of(EngineRetired)
    assert told in retired.cause
    assert retired.t - death.t == pytest.approx(min(account_s, ACCOUNT_TIMEOUT_S), abs=0.1)
