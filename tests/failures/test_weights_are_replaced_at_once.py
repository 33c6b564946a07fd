"""New versions come faster than an engine that is told of one can begin to pull it."""

from pathlib import Path

import pytest
from support import Scripted

from staleflow import Config
from staleflow.events import Published, Synced
from staleflow.testing import ScriptedTrainer


class HastyTrainer(ScriptedTrainer):
    """Trains and publishes in one turn of the event loop."""

    def __init__(self) -> None:
        super().__init__(step_s=0.0)

    async def publish(self, weights: Path) -> None:
        (weights / "weights.safetensors").touch()


@pytest.mark.parametrize("max_staleness", [1, 4, 16])
def test_version_of_a_sync_stays_pullable_until_the_engine_has_it(scripted: Scripted, max_staleness: int) -> None:
    # All groups that the bound lets live are done at the same moment, so that as many batches are ready.
    run = scripted(Config(steps=40, batch_size=2, max_staleness=max_staleness), trainer=HastyTrainer())
    report = run.run()
    assert report.steps == 40
    assert len(run.events_of(Published)) == 40
    assert len(run.events_of(Synced)) > 0
