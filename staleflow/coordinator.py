"""The coordinator: a snapshot in, commands out.

``decide`` is a pure function. It owns no IO and no clock, so the pipeline and a simulator can run the same
decisions; a policy is one class with this method.
"""

from collections.abc import Iterable
from enum import Enum, auto
from typing import Protocol, TypeAlias, get_args

import msgspec

from staleflow.errors import ConfigError
from staleflow.types import SyncMode


class Health(Enum):
    """What can be expected of an engine (``docs/design/engines.md``)."""

    HEALTHY = auto()
    """It has confirmed the version it serves."""
    SYNCING = auto()
    """It is to pull a version."""
    STALE = auto()
    """It has started again and confirmed no published version since."""
    DEAD = auto()
    """It has yet to start, or to start again."""
    RETIRED = auto()
    """It has died too often, and never comes back."""


ALIVE = frozenset({Health.HEALTHY, Health.SYNCING, Health.STALE})


class EngineView(msgspec.Struct, frozen=True):
    """One engine at the time of the snapshot.

    ``version`` is the one it has confirmed, the least that any token sampled from now on can have; ``running``
    counts the requests it has not answered. Only an ``open`` one takes requests. ``epoch`` counts its deaths: an engine
    of another epoch has forgotten all that was decided about it. ``held_at`` is the version that an evaluation holds it
    at: it pulls that, if it has yet to, and nothing newer; None if it is not held.
    """

    engine: int
    version: int
    health: Health
    open: bool
    running: int
    capacity: int
    epoch: int = 0
    held_at: int | None = None


class WaitingRequest(msgspec.Struct, frozen=True):
    """A request that no engine has; it may run where the version is at least ``min_version``.

    One that is ``pinned`` belongs to an evaluation, and may run only where that version is served and held.
    """

    request_id: str
    min_version: int
    pinned: bool = False


class RunningRequest(msgspec.Struct, frozen=True):
    """A request that an engine has, since ``since_s`` on the clock of the run's event loop."""

    request_id: str
    min_version: int
    engine: int
    since_s: float


class Snapshot(msgspec.Struct, frozen=True):
    """All that a decision may depend on.

    ``waiting`` is in order of priority, ``running`` in that of dispatch. ``running_members`` counts members of live
    groups that have not finished, on an engine or not; ``group_size`` is what one more admission adds to them;
    ``wanted_groups`` is how many more groups the rest of the run can use.
    """

    engines: tuple[EngineView, ...]
    waiting: tuple[WaitingRequest, ...]
    running_members: int
    group_size: int
    wanted_groups: int
    published: int
    running: tuple[RunningRequest, ...] = ()


class Route(msgspec.Struct, frozen=True):
    """Send a waiting request to an engine."""

    request_id: str
    engine: int


class Admit(msgspec.Struct, frozen=True):
    """Ask the ledger for one new group at the version of this engine."""

    engine: int


class Sync(msgspec.Struct, frozen=True):
    """Let a healthy or stale engine pull ``version``; ``mode`` says what becomes of its running requests."""

    engine: int
    version: int
    mode: SyncMode = "keep"


class Migrate(msgspec.Struct, frozen=True):
    """Let a request that runs on another engine go on there, with the tokens so far; that engine must be open and of at
    least the version of the request's group."""

    request_id: str
    engine: int


Command: TypeAlias = Route | Admit | Sync | Migrate


class Coordinator(Protocol):
    """A coordination policy."""

    def decide(self, snapshot: Snapshot) -> list[Command]:
        """Commands to carry out, in order; called again whenever something has changed."""


def may_answer(engine: EngineView, request: WaitingRequest) -> bool:
    """Whether a request may run on an engine."""
    if request.pinned:
        return engine.held_at == engine.version == request.min_version
    return engine.version >= request.min_version


class LeastLoad:
    """Every request to the eligible engine with the least load; every engine that is not held to the newest version at
    once.

    Args:
        sync_mode: of every sync.
    """

    def __init__(self, *, sync_mode: SyncMode = "keep") -> None:
        if sync_mode not in get_args(SyncMode):
            raise ConfigError(f"sync_mode is {sync_mode!r}; it must be one of {', '.join(get_args(SyncMode))}")
        self._sync_mode = sync_mode

    def decide(self, snapshot: Snapshot) -> list[Command]:
        """See :class:`Coordinator`."""
        running = {engine.engine: engine.running for engine in snapshot.engines}
        syncs = [
            Sync(engine.engine, wanted, self._sync_mode)
            for engine in snapshot.engines
            for wanted in [snapshot.published if engine.held_at is None else engine.held_at]
            if engine.health is Health.STALE or (engine.health is Health.HEALTHY and engine.version < wanted)
        ]
        # An engine that is about to close takes nothing more.
        closing = set() if self._sync_mode == "keep" else {sync.engine for sync in syncs}
        takers = [engine for engine in snapshot.engines if engine.open and engine.engine not in closing]
        commands: list[Command] = [*syncs]
        for request in snapshot.waiting:
            eligible = [engine for engine in takers if may_answer(engine, request)]
            chosen = _least_loaded(eligible, running)
            if chosen is not None:
                running[chosen.engine] += 1
                commands.append(Route(request.request_id, chosen.engine))
        if takers and snapshot.wanted_groups > 0 and self._has_room(snapshot):
            newest = max(engine.version for engine in takers)
            candidates = [engine for engine in takers if engine.version == newest]
            commands.append(Admit(min(candidates, key=lambda engine: running[engine.engine]).engine))
        return commands

    def _has_room(self, snapshot: Snapshot) -> bool:
        # Admitting no more than the engines can run keeps new groups waiting for the newest weights instead of
        # ageing in a queue. A group larger than all engines together still has to start.
        alive = [engine for engine in snapshot.engines if engine.health in ALIVE]
        newest = max((engine.version for engine in alive), default=0)
        # One that is held behind the others serves none of them.
        capacity = sum(engine.capacity for engine in alive if engine.held_at is None or engine.version == newest)
        return snapshot.running_members == 0 or snapshot.running_members + snapshot.group_size <= capacity


def _least_loaded(engines: Iterable[EngineView], running: dict[int, int]) -> EngineView | None:
    with_room = (engine for engine in engines if running[engine.engine] < engine.capacity)
    return min(with_room, key=lambda engine: running[engine.engine], default=None)
