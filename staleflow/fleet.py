"""The fleet: the engines as one, with what the controller believes of each.

It carries requests to the engine they are routed to, and brings back answers or interruptions. Where they go is for the
coordinator to decide, what an interruption means for a trajectory is for :mod:`staleflow.continuation`. States and
invariants: ``docs/design/engines.md``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from tokenizers import Tokenizer

from staleflow import clock
from staleflow.abandon import abandon, done_or_set
from staleflow.coordinator import EngineView, Health, RunningRequest
from staleflow.engine_state import EngineState, Request
from staleflow.engines.base import Engine, check_generation
from staleflow.errors import EngineError, EngineGoneError
from staleflow.meters import IdleMeter
from staleflow.outage import Outage
from staleflow.statistics import FleetStatistics
from staleflow.store import TrajectoryStore
from staleflow.types import GenerateRequest, Generation, Interruption, TaskData


class Answer(NamedTuple):
    """What came of a request: the engine that had it and since when, what it said, and why it was let go, if it was.

    ``destination`` is the engine that its successor is meant for, if it was to migrate.
    """

    engine: int
    since_s: float
    generation: Generation
    why: Interruption | None
    destination: int | None


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
        self.states = tuple(EngineState(index, engine) for index, engine in enumerate(engines))
        self.outage = Outage()
        self.load = IdleMeter(clock.now)
        self.discarded_tokens = 0
        self._store = store
        self._published = published
        self._changed = changed
        self._requests: dict[str, Request] = {}
        self._running: dict[str, RunningRequest] = {}
        self._arrivals: list[tuple[str, int]] = []
        self._interrupted: Counter[str] = Counter()
        self._deaths_before = self._restarts_before = 0

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines, by index."""
        return tuple(state.engine for state in self.states)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self.states[0].engine.tokenizer

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence that every engine can serve, as far as they have started."""
        return min(state.engine.max_model_tokens for state in self.states if state.lives)

    @property
    def capacity(self) -> int:
        """How many requests all engines together can usefully run at once, those that are away included."""
        return sum(state.engine.capacity for state in self.states if state.health is not Health.RETIRED)

    def views(self) -> tuple[EngineView, ...]:
        """The engines' part of a snapshot."""
        return tuple(state.view for state in self.states)

    @property
    def running_requests(self) -> tuple[RunningRequest, ...]:
        """The requests that engines have, those dispatched first in front."""
        return tuple(self._running.values())

    def version(self, engine: int) -> int:
        """The version an engine has confirmed."""
        return self.states[engine].version

    def statistics(self) -> FleetStatistics:
        """How the engines are, and what has happened to them."""
        return FleetStatistics(
            serving=sum(state.serves for state in self.states),
            deaths=self._deaths_before + sum(state.epoch for state in self.states),
            restarts=self._restarts_before + sum(state.restarts for state in self.states),
            retired=sum(state.health is Health.RETIRED for state in self.states),
            interrupted=dict(self._interrupted),
            discarded_tokens=self.discarded_tokens,
        )

    def resume(self, before: FleetStatistics) -> None:
        """Go on counting from what has happened before."""
        self._deaths_before, self._restarts_before = before.deaths, before.restarts
        self._interrupted.update(before.interrupted)
        self.discarded_tokens += before.discarded_tokens

    # -- holding -------------------------------------------------------------------------------------------------

    @property
    def least_busy(self) -> int | None:
        """Of the engines that serve, the one with the fewest requests, the first of equal ones; None if none does."""
        serving = [state for state in self.states if state.serves]
        return min(serving, key=lambda state: len(state.requests)).index if serving else None

    @property
    def not_retired(self) -> tuple[int, ...]:
        """The engines that serve or may come back."""
        return tuple(state.index for state in self.states if state.health is not Health.RETIRED)

    def hold(self, engine: int, version: int) -> None:
        """Keep an engine from everything newer than ``version``, which it may yet have to pull."""
        self.states[engine].held_at = version
        self._changed()

    def let_go(self, engine: int) -> None:
        """Undo :meth:`hold`."""
        self.states[engine].held_at = None
        self._changed()

    def holds(self, version: int) -> bool:
        """Whether an engine is held at a version."""
        return any(state.held_at == version for state in self.states)

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, *, min_version: int, pinned: bool = False, destination: int | None = None
    ) -> Answer:
        """Answer a request on an engine of at least ``min_version``, or on one held at exactly that if it is
        ``pinned``; on that of ``destination`` if it can be.

        Raises :class:`EngineError` when the engine cannot serve the request or its reply is malformed, and when no
        engine is held that a pinned one could wait for.
        """
        if pinned and not self.holds(min_version):
            raise EngineError(f"no engine is held at version {min_version}, which {request.request_id} is pinned to")
        chosen = self._store.wait_for_engine(request.request_id, min_version, pinned=pinned)
        ours = self._requests[request.request_id] = Request(request.request_id, min_version)
        if destination is not None:
            self._arrivals.append((request.request_id, destination))
        self._changed()
        try:
            state = self.states[await chosen]
            generation = await self._ask(state, ours, request)
        finally:
            self._store.forget(request.request_id)
            del self._requests[request.request_id]
            if ours.engine is not None:
                ours.engine.let_go(ours)
                del self._running[ours.id]
                self.load.ended()
            self._changed()
        newest, vocabulary = min_version if pinned else self._published(), state.engine.vocabulary
        check_generation(request, generation, oldest=ours.version, published=newest, vocabulary=vocabulary)
        why = None
        if generation.finish_reason == "interrupted":
            why = ours.why or Interruption.ENGINE
            self._interrupted[why.value] += 1
        return Answer(state.index, ours.since_s, generation, why, ours.destination)

    async def _ask(self, state: EngineState, ours: Request, request: GenerateRequest) -> Generation:
        calling = asyncio.ensure_future(_call(state.engine, ours, request))
        try:
            await done_or_set(calling, ours.lost)
            if not ours.lost.is_set():
                answer = calling.result()
                forgotten = next((version for version in answer.versions if version < ours.version), None)
                if forgotten is None:
                    return answer
                self.died(
                    state,
                    EngineError(f"{state.name} answers with version {forgotten}, and had confirmed {ours.version}"),
                )
        except EngineGoneError as error:
            self.died(state, error)
        finally:
            abandon(calling)
        return _nothing(request.request_id)

    def arrivals(self) -> list[tuple[str, int]]:
        """The requests that were migrated and wait, with the engines they are meant for, since this was called last."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def dispatch(self, request_id: str, engine: int) -> bool:
        """Give a waiting request its engine; False when it no longer waits or the engine must not have it."""
        state = self.states[engine]
        if not state.open or not self._store.route(request_id, state.view):
            return False
        request = self._requests[request_id]
        state.take(request)
        self._running[request_id] = RunningRequest(request_id, request.min_version, engine, request.since_s)
        self.load.started()
        return True

    def running(self, request_id: str) -> tuple[int, float] | None:
        """The engine that a request runs on, and since when; None if it runs on none."""
        running = self._running.get(request_id)
        return None if running is None else (running.engine, running.since_s)

    async def interrupt(self, request_id: str, why: Interruption) -> None:
        """Have the engine let go of a request, if one has it."""
        request = self._requests.get(request_id)
        if request is None or request.engine is None or request.why is Interruption.DEATH:
            return
        request.why = why
        if request.sent:
            # Of a dead engine its supervision tells; one that cannot be told is asked again or found out.
            with suppress(EngineError):
                await request.engine.engine.interrupt(request_id)

    async def migrate(self, request_id: str, engine: int) -> None:
        """Have a running request go on elsewhere; nothing happens if it does not run or must not run there."""
        request, to = self._requests.get(request_id), self.states[engine]
        if request is None or request.engine in (None, to) or request.why is not None:
            return
        if to.open and to.version >= request.min_version:
            request.destination = engine
            await self.interrupt(request_id, Interruption.MIGRATE)

    # -- engines -------------------------------------------------------------------------------------------------

    def started(self, state: EngineState) -> None:
        """An engine has started, for the first time or again."""
        state.start(self._published())
        self._health_changed()

    def confirmed(self, state: EngineState, version: int) -> None:
        """An engine serves a version."""
        state.confirm(version)
        self._health_changed()

    def died(self, state: EngineState, error: EngineError) -> None:
        """An engine is gone. Its requests are interrupted."""
        state.die(error)
        self._health_changed()

    def retired(self, state: EngineState) -> None:
        """A dead engine will not be started again."""
        state.retire()
        for waiting in self._store.waiting:
            if waiting.pinned and not self.holds(waiting.min_version):
                self._store.refuse(
                    waiting.request_id,
                    EngineError(
                        f"{state.name}, held at the version that {waiting.request_id} is pinned to, is given up"
                    ),
                )
        self._health_changed()

    def _health_changed(self) -> None:
        self.outage.update(serves=any(state.serves for state in self.states))
        self._changed()


async def _call(engine: Engine, ours: Request, request: GenerateRequest) -> Generation:
    if ours.why is not None:
        # Let go before the engine has heard of it: an interruption must never overtake its request.
        return _nothing(request.request_id)
    ours.sent = True
    return await engine.generate(request)


def _nothing(request_id: str) -> Generation:
    return Generation(request_id, [], [], [], "interrupted")
