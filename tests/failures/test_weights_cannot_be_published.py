"""New weights cannot be published: the version does not advance and the batch is given back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import Scripted

from staleflow import Config
from staleflow.errors import TrainerError
from staleflow.events import Consumed, Published, Released, Synced
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.testing import ScriptedTrainer


def test_V11_failed_publication_does_not_advance_the_version(scripted: Scripted) -> None:
    class FailsAtThirdPublish(ScriptedTrainer):
        async def publish(self, weights: Path) -> None:
            if len(self.batches) == 3:
                await super().publish(weights)
                raise TrainerError("publish failed: no space left")
            await super().publish(weights)

    run = scripted(Config(steps=9, batch_size=2, group_size=2), trainer=FailsAtThirdPublish())
    assert str(run.fail(TrainerError)) == "publish failed: no space left"
    assert [event.batch for event in run.events_of(Consumed)] == [0, 1, 2]
    assert [event.version for event in run.events_of(Published)] == [1, 2]
    assert [event.batch for event in run.events_of(Released)] == [2]
    assert max(event.version for event in run.events_of(Synced)) <= 2
    assert len(run.replay().trained) == 4


def test_V11_parameter_server_that_fails_does_not_advance_the_version(scripted: Scripted, tmp_path: Path) -> None:
    class FailsAtTheLastMoment(SharedMemoryParameterServer):
        @contextmanager
        def publishing(self, version: int) -> Iterator[Path]:
            with super().publishing(version) as weights:
                yield weights
                if version == 2:
                    raise OSError("no space left in shared memory")

    weights = tmp_path / "shm"
    weights.mkdir()
    run = scripted(Config(steps=9, batch_size=2, group_size=2), parameter_server=FailsAtTheLastMoment(weights))
    assert "no space left" in str(run.fail(OSError))
    assert [event.version for event in run.events_of(Published)] == [1]
    assert [event.batch for event in run.events_of(Released)] == [1]
    assert list(weights.iterdir()) == []


def test_V11_trainer_that_writes_nothing_publishes_nothing(scripted: Scripted) -> None:
    class WritesNothing(ScriptedTrainer):
        async def publish(self, weights: Path) -> None:
            return

    run = scripted(Config(steps=2, batch_size=1, group_size=1), trainer=WritesNothing())
    run.fail(FileNotFoundError)
    assert run.events_of(Published) == []


def test_V11_versions_are_pulled_only_after_they_are_published(scripted: Scripted) -> None:
    run = scripted(Config(steps=8, batch_size=2, group_size=2), trainer=ScriptedTrainer(publish_s=0.3))
    run.run()
    published = {event.version: event.t for event in run.events_of(Published)}
    assert all(event.t >= published[event.version] for event in run.events_of(Synced))
    with pytest.raises(KeyError):
        published[9]
