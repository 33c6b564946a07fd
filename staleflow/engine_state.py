"""What is believed of one engine: its health, its version, and the requests that it has.

Invariants: ``version`` is raised only by the engine's own confirmation, in the life in which it was asked for it. An
engine takes requests only while it is ``open``, and none of them outlives the engine's epoch.
"""

import asyncio

from staleflow import clock
from staleflow.coordinator import ALIVE, EngineView, Health
from staleflow.engines.base import Engine
from staleflow.errors import EngineError
from staleflow.types import Interruption, SyncMode


class Request:
    """A request from when it waits for an engine until it has ended.

    ``version`` is what its engine had confirmed when it was dispatched, ``lost`` is set when that has died. ``sent``
    says that the engine has heard of it. ``why`` is set when it is to be let go, ``destination`` if its successor is
    meant for one engine.
    """

    def __init__(self, request_id: str, min_version: int) -> None:
        self.id = request_id
        self.min_version = min_version
        self.engine: EngineState | None = None
        self.version = min_version
        self.since_s = clock.now()
        self.sent = False
        self.why: Interruption | None = None
        self.destination: int | None = None
        self.lost = asyncio.Event()


class EngineState:
    """One engine as the controller believes it to be; ``death`` is why it died last, if it did."""

    def __init__(self, index: int, engine: Engine) -> None:
        self.index = index
        self.engine = engine
        self.name = f"engine-{index}"
        self.version = 0
        self.health = Health.DEAD
        self.held_at: int | None = None
        self.open = False
        self.serves = False
        """Whether it lives and has confirmed a version in this life; since when it had, in the newest life."""
        self.serves_since_s: float | None = None
        self.epoch = 0
        self.lives = self.restarts = 0
        self.requests: dict[str, Request] = {}
        self.empty = asyncio.Event()
        self.empty.set()
        self.died = asyncio.Event()
        self.death: EngineError | None = None

    @property
    def view(self) -> EngineView:
        """Its part of a snapshot."""
        running, capacity = len(self.requests), self.engine.capacity
        return EngineView(self.index, self.version, self.health, self.open, running, capacity, self.epoch, self.held_at)

    @property
    def alive(self) -> bool:
        """Whether it has started and not died since."""
        return self.health in ALIVE

    def take(self, request: Request) -> None:
        """It has one more request."""
        request.engine, request.version, request.since_s = self, self.version, clock.now()
        self.requests[request.id] = request
        self.empty.clear()

    def let_go(self, request: Request) -> None:
        """The request has ended."""
        del self.requests[request.id]
        if not self.requests:
            self.empty.set()

    def start(self, published: int) -> None:
        """It has loaded the initial weights."""
        self.lives += 1
        self.restarts += self.epoch > 0
        self.version = 0
        self.health = Health.STALE
        self.serves_since_s = None
        self.died.clear()
        if published == 0:
            self.confirm(0)

    def begin_sync(self, mode: SyncMode) -> None:
        """It is to pull a version."""
        self.health = Health.SYNCING
        self.open = self.open and mode == "keep"

    def confirm(self, version: int) -> None:
        """It has said that it serves this version."""
        self.version = version
        self.health = Health.HEALTHY
        if not self.serves:
            self.serves_since_s = clock.now()
        self.open = self.serves = True

    def die(self, error: EngineError) -> None:
        """It is gone, with all that it was doing."""
        self.epoch += 1
        self.health = Health.DEAD
        self.open = self.serves = False
        self.death = error
        self.died.set()
        for request in self.requests.values():
            request.why = Interruption.DEATH
            request.lost.set()

    def retire(self) -> None:
        """It will not be started again."""
        self.held_at = None
        self.health = Health.RETIRED
