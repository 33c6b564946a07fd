"""The fleet: the engines as one, with what the controller believes of each.

It carries requests to the engine they are routed to and weights to the engine that is to sync. It decides neither.

Invariant: an engine's ``version`` is the last one it has confirmed. It is raised only by the engine's own answer to
a weight update, so no token sampled for a request dispatched now can be older.
"""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from staleflow import clock
from staleflow.coordinator import EngineView, Health
from staleflow.engines.base import Engine, check_generation
from staleflow.errors import EngineError
from staleflow.meters import IdleMeter
from staleflow.parameter_server.base import ParameterServer
from staleflow.store import TrajectoryStore
from staleflow.types import GenerateRequest, Generation, TaskData


class _Slot:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version = 0
        self.health = Health.HEALTHY
        self.held_at: int | None = None
        self.requests: dict[str, float] = {}
        """Those that it has not answered, and since when it has them."""

    @property
    def running(self) -> int:
        return len(self.requests)


class Fleet:
    """All engines of a run.

    Args:
        engines: at least one, all serving the same model.
        store: where requests wait for an engine.
        published: the newest version an engine can have.
        changed: called whenever there is something new to decide.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        store: TrajectoryStore[TaskData],
        published: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        self._slots = [_Slot(engine) for engine in engines]
        self._store = store
        self._published = published
        self._changed = changed
        self.load = IdleMeter(clock.now)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines, by index."""
        return tuple(slot.engine for slot in self._slots)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._slots[0].engine.tokenizer

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence that every engine can serve."""
        return min(slot.engine.max_model_tokens for slot in self._slots)

    @property
    def capacity(self) -> int:
        """How many requests all engines together can usefully run at once."""
        return sum(slot.engine.capacity for slot in self._slots)

    def views(self) -> tuple[EngineView, ...]:
        """The engines' part of a snapshot."""
        return tuple(
            EngineView(index, slot.version, slot.health, slot.running, slot.engine.capacity, slot.held_at)
            for index, slot in enumerate(self._slots)
        )

    def version(self, engine: int) -> int:
        """The version an engine has confirmed."""
        return self._slots[engine].version

    @property
    def least_busy(self) -> int:
        """The engine with the fewest requests; the first of equal ones."""
        return min(range(len(self._slots)), key=lambda index: self._slots[index].running)

    def hold(self, engine: int, version: int) -> None:
        """Keep an engine from everything newer than ``version``, which it may yet have to pull."""
        self._slots[engine].held_at = version
        self._changed()

    def let_go(self, engine: int) -> None:
        """Undo :meth:`hold`."""
        self._slots[engine].held_at = None
        self._changed()

    def may_sync(self, engine: int, version: int) -> bool:
        """Whether nothing holds an engine at another version."""
        return self._slots[engine].held_at in (None, version)

    def dispatch(self, request_id: str, engine: int) -> bool:
        """Give a waiting request its engine; False when it no longer waits."""
        if not self._store.route(request_id, engine):
            return False
        self._slots[engine].requests[request_id] = clock.now()
        self.load.started()
        return True

    async def generate(
        self, request: GenerateRequest, *, min_version: int, pinned: bool = False
    ) -> tuple[int, Generation]:
        """Answer a request on an engine of at least ``min_version``, or exactly that if it is ``pinned``; returns which
        engine that was, and its answer.

        Raises :class:`EngineError` when the engine cannot serve the request or its reply is malformed.
        """
        chosen = self._store.wait_for_engine(request.request_id, min_version, pinned=pinned)
        self._changed()
        try:
            index = await chosen
            generation = await self._slots[index].engine.generate(request)
        finally:
            self._store.forget(request.request_id)
            if chosen.done() and not chosen.cancelled():
                del self._slots[chosen.result()].requests[request.request_id]
                self.load.ended()
            self._changed()
        vocabulary = self._slots[index].engine.vocabulary
        newest = min_version if pinned else self._published()
        check_generation(request, generation, oldest=min_version, published=newest, vocabulary=vocabulary)
        return index, generation

    def running(self, request_id: str) -> tuple[int, float] | None:
        """The engine that a request runs on, and since when; None if it runs on none."""
        for index, slot in enumerate(self._slots):
            if request_id in slot.requests:
                return index, slot.requests[request_id]
        return None

    async def truncate(self, request_id: str) -> None:
        """End a running request with the tokens it has sampled so far."""
        if (running := self.running(request_id)) is not None:
            await self._slots[running[0]].engine.truncate(request_id)

    def begin_sync(self, engine: int) -> None:
        """Mark an engine as syncing; it goes on serving, at its old version as far as anyone may believe."""
        self._slots[engine].health = Health.SYNCING

    async def sync(self, engine: int, version: int, parameter_server: ParameterServer) -> None:
        """Let an engine pull a version; raises :class:`EngineError` when it confirms another one."""
        slot = self._slots[engine]
        with parameter_server.pulling(version) as weights:
            confirmed = await slot.engine.update_weights(version, weights)
        if confirmed != version:
            raise EngineError(f"engine {engine} confirmed version {confirmed} after it was told to pull {version}")
        slot.version = confirmed
        slot.health = Health.HEALTHY
        self._changed()
