import random

import msgspec
import pytest

from staleflow.coordinator import Admit, Command, EngineView, Health, LeastLoad, Route, Snapshot, Sync, WaitingRequest
from staleflow.errors import ConfigError
from staleflow.types import SyncMode


def engine(
    index: int,
    *,
    version: int = 0,
    running: int = 0,
    capacity: int = 4,
    health: Health = Health.HEALTHY,
    held_at: int | None = None,
) -> EngineView:
    return EngineView(
        index, version, health, health in (Health.HEALTHY, Health.SYNCING), running, capacity, held_at=held_at
    )


def snapshot(
    *engines: EngineView,
    waiting: list[tuple[str, int]] | None = None,
    running_members: int = 0,
    group_size: int = 1,
    wanted_groups: int = 0,
    published: int = 0,
) -> Snapshot:
    requests = tuple(WaitingRequest(request, version) for request, version in waiting or [])
    return Snapshot(engines, requests, running_members, group_size, wanted_groups, published)


def decide(snapshot: Snapshot) -> list[Command]:
    return LeastLoad().decide(snapshot)


def test_nothing_to_do() -> None:
    assert decide(snapshot(engine(0), engine(1))) == []


def test_requests_go_to_the_least_loaded_engine_oldest_first() -> None:
    engines = (engine(0, running=2), engine(1, running=1))
    waiting = [("a", 0), ("b", 0), ("c", 0)]
    assert decide(snapshot(*engines, waiting=waiting)) == [Route("a", 1), Route("b", 0), Route("c", 1)]


def test_no_engine_gets_more_than_its_capacity() -> None:
    engines = (engine(0, running=3), engine(1, running=4))
    assert decide(snapshot(*engines, waiting=[("a", 0), ("b", 0)])) == [Route("a", 0)]


def test_request_goes_only_where_the_weights_are_new_enough() -> None:
    engines = (engine(0, version=1), engine(1, version=2, running=3))
    waiting = [("a", 2), ("b", 2), ("c", 1)]
    assert decide(snapshot(*engines, waiting=waiting, published=1)) == [Route("a", 1), Route("c", 0)]


def test_engine_behind_is_synced_once() -> None:
    engines = (engine(0, version=1), engine(1, version=2), engine(2, version=1, health=Health.SYNCING))
    assert decide(snapshot(*engines, published=2)) == [Sync(0, 2)]


def test_held_engine_is_synced_to_the_version_it_is_held_at_and_no_further() -> None:
    engines = (engine(0, version=1, held_at=2), engine(1, version=2, held_at=2), engine(2, version=1))
    assert decide(snapshot(*engines, published=4)) == [Sync(0, 2), Sync(2, 4)]


def test_request_of_an_evaluation_goes_only_to_an_engine_held_at_its_version() -> None:
    view = snapshot(engine(0, version=2), engine(1, version=1, held_at=2), engine(2, version=3), published=3)
    pinned = WaitingRequest("a", 2, pinned=True)
    view = msgspec.structs.replace(view, waiting=(pinned,))
    assert [command for command in decide(view) if isinstance(command, Route)] == []
    held = msgspec.structs.replace(view, engines=(*view.engines, engine(3, version=2, running=3, held_at=2)))
    assert [command for command in decide(held) if isinstance(command, Route)] == [Route("a", 3)]


def test_other_requests_may_run_beside_an_evaluation() -> None:
    assert decide(snapshot(engine(0, version=2, held_at=2), waiting=[("a", 1)], published=2)) == [Route("a", 0)]


@pytest.mark.parametrize(("running_members", "admitted"), [(3, True), (4, False)])
def test_engine_held_behind_the_others_makes_no_room(running_members: int, admitted: bool) -> None:
    engines = (engine(0, version=3), engine(1, version=2, held_at=2))
    view = snapshot(*engines, wanted_groups=9, running_members=running_members, published=3)
    assert (Admit(0) in decide(view)) == admitted


def test_engine_held_alone_goes_on_admitting() -> None:
    view = snapshot(engine(0, version=2, held_at=2), wanted_groups=9, running_members=3, published=3)
    assert decide(view) == [Admit(0)]


def test_group_is_admitted_at_the_newest_version_where_there_is_room() -> None:
    engines = (engine(0, version=2, running=1), engine(1, version=2), engine(2, version=1))
    assert Admit(1) in decide(snapshot(*engines, wanted_groups=1, running_members=1, published=2))


@pytest.mark.parametrize(("running_members", "admitted"), [(0, True), (4, True), (5, False), (8, False)])
def test_no_more_members_than_the_engines_can_run(running_members: int, admitted: bool) -> None:
    view = snapshot(engine(0), engine(1), wanted_groups=9, running_members=running_members, group_size=4)
    assert (Admit(0) in decide(view)) == admitted


def test_group_larger_than_all_engines_is_admitted_alone() -> None:
    assert decide(snapshot(engine(0), wanted_groups=1, group_size=100)) == [Admit(0)]
    assert decide(snapshot(engine(0), wanted_groups=1, group_size=100, running_members=1)) == []


@pytest.mark.parametrize("seed", range(20))
def test_decision_is_a_function_of_the_snapshot_and_never_overloads(seed: int) -> None:
    rng = random.Random(seed)
    engines = tuple(
        engine(
            index,
            version=rng.randrange(4),
            running=rng.randrange(5),
            capacity=rng.randint(1, 6),
            health=rng.choice(list(Health)),
        )
        for index in range(rng.randint(1, 4))
    )
    waiting = [(f"{n}", rng.randrange(5)) for n in range(rng.randrange(12))]
    view = snapshot(*engines, waiting=waiting, wanted_groups=rng.randrange(3), published=3)
    commands = decide(view)
    assert commands == decide(view)
    needs = dict(waiting)
    running = {engine.engine: engine.running for engine in engines}
    for command in commands:
        if isinstance(command, Route):
            running[command.engine] += 1
            assert running[command.engine] <= engines[command.engine].capacity
            assert engines[command.engine].open
            assert engines[command.engine].version >= needs.pop(command.request_id)
    # Whoever still waits has no engine with room that is new enough.
    for version in needs.values():
        assert not [e for e in engines if e.open and e.version >= version and running[e.engine] < e.capacity]


def test_stale_engine_is_synced_though_its_version_is_said_to_be_published() -> None:
    engines = (engine(0, version=2, health=Health.STALE), engine(1, version=2))
    assert decide(snapshot(*engines, published=2)) == [Sync(0, 2)]


@pytest.mark.parametrize("health", [Health.STALE, Health.DEAD, Health.RETIRED])
def test_engine_that_is_not_there_gets_nothing_and_counts_for_nothing(health: Health) -> None:
    engines = (engine(0, version=3, health=health, capacity=100), engine(1, version=2, running=3))
    view = snapshot(*engines, waiting=[("a", 0)], wanted_groups=1, running_members=3, group_size=1, published=3)
    commands = decide(view)
    assert Route("a", 1) in commands
    assert Admit(0) not in commands


def test_without_an_open_engine_nothing_is_routed_or_admitted() -> None:
    view = snapshot(engine(0, health=Health.DEAD), waiting=[("a", 0)], wanted_groups=1)
    assert decide(view) == []


@pytest.mark.parametrize("mode", ["recompute", "drain", "abort"])
def test_engine_that_is_about_to_close_takes_nothing_more(mode: SyncMode) -> None:
    engines = (engine(0, version=1), engine(1, version=2, running=3))
    view = snapshot(*engines, waiting=[("a", 0), ("b", 0)], published=2)
    assert LeastLoad(sync_mode=mode).decide(view) == [Sync(0, 2, mode), Route("a", 1)]


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="sync_mode is 'pause'; it must be one of keep, recompute, drain, abort"):
        LeastLoad(sync_mode="pause")  # type: ignore[arg-type]
