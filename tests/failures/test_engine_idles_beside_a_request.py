"""A place falls free, the request that gets it was just cancelled, and the next one is not thought of (H6)."""

import asyncio
from pathlib import Path

from support import virtually

from staleflow.coordinator import EngineView, Health
from staleflow.fleet import Fleet
from staleflow.store import TrajectoryStore
from staleflow.testing import ScriptedEngine
from staleflow.types import GenerateRequest


def test_H6_cancelled_request_is_not_offered_to_an_engine() -> None:
    async def main() -> None:
        store: TrajectoryStore[int] = TrajectoryStore()
        cancelled, waiting = store.wait_for_engine("cancelled", 0), store.wait_for_engine("waiting", 0)
        cancelled.cancel()
        assert [request.request_id for request in store.waiting] == ["waiting"]
        assert not store.route("cancelled", EngineView(0, 0, Health.HEALTHY, True, 0, 1))
        assert not waiting.done()

    virtually(main())


def test_H6_every_request_that_ends_is_a_change(tmp_path: Path) -> None:
    """Whatever became of it: it may have been routed in vain a moment before."""

    async def main() -> None:
        store: TrajectoryStore[int] = TrajectoryStore()
        changes: list[int] = []
        fleet = Fleet([ScriptedEngine()], store, lambda: 0, lambda: changes.append(1))
        request = asyncio.ensure_future(fleet.generate(GenerateRequest("a", [1], 4), min_version=0))
        await asyncio.sleep(1.0)
        assert len(changes) == 1
        request.cancel()
        await asyncio.wait({request})
        assert len(changes) == 2
        assert store.waiting == ()

    virtually(main())
