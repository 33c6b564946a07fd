"""New versions come faster than an engine that is told of one can begin to pull it."""

import asyncio
from pathlib import Path

import pytest
from support import Scripted, virtually

from staleflow import Config
from staleflow.errors import EngineError
from staleflow.events import Published, Synced
from staleflow.fleet import Fleet
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.store import TrajectoryStore
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.weight_sync import WeightSync


class HastyTrainer(ScriptedTrainer):
    """Trains and publishes in one turn of the event loop."""

    def __init__(self) -> None:
        super().__init__(step_s=0.0)

    async def publish(self, weights: Path) -> None:
        (weights / "weights.safetensors").touch()


@pytest.mark.parametrize("max_staleness", [4, 16])
def test_version_of_a_sync_stays_pullable_until_the_engine_has_it(scripted: Scripted, max_staleness: int) -> None:
    # All groups that the bound lets live are done at the same moment, so that as many batches are ready.
    run = scripted(Config(steps=40, batch_size=2, max_staleness=max_staleness), trainer=HastyTrainer())
    report = run.run()
    assert report.steps == 40
    assert len(run.events_of(Published)) == 40
    assert len(run.events_of(Synced)) > 0


class LeavesLate(ScriptedEngine):
    """Looks at the weights once more when it is told to let them be."""

    async def update_weights(self, version: int, weights: Path) -> int:
        try:
            await asyncio.sleep(1000.0)
        finally:
            await asyncio.sleep(1.0)
            self.saw = weights.is_dir()  # noqa: ASYNC240 - on a virtual clock nothing else could run meanwhile
        return version


def test_version_stays_pullable_until_an_update_that_was_given_up_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        engine, weights = LeavesLate(), SharedMemoryParameterServer(tmp_path)
        fleet = Fleet([engine], TrajectoryStore[int](), lambda: 1, lambda: None)
        syncs = WeightSync(fleet, weights, drain_timeout_s=60.0)
        publish(weights, 1)
        fleet.started(fleet.states[0])
        begun = syncs.begin(0, 1, "keep")
        assert begun is not None
        carrying_out = asyncio.create_task(syncs.carry_out(begun))
        await asyncio.sleep(0.5)
        fleet.died(fleet.states[0], EngineError("it is gone"))
        assert not await carrying_out
        for version in (2, 3, 4):
            publish(weights, version)
        assert weights.versions == (1, 3, 4)
        await asyncio.sleep(2.0)
        assert engine.saw
        assert list(weights.versions) == [3, 4]
        weights.close()

    virtually(main())


def publish(weights: SharedMemoryParameterServer, version: int) -> None:
    with weights.publishing(version) as folder:
        (folder / "weights.safetensors").touch()
