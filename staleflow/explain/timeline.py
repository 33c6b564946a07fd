"""The picture of a recorded run at one moment, moved forward event by event.

It says what is: what every member, engine, the trainer and the task source are doing, and what the ledger says. Why
somebody waits is for ``causes`` to say.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias, assert_never

import msgspec

from staleflow.blockers import Activity, Member
from staleflow.errors import RunFolderError
from staleflow.events import (
    Aborted,
    Admitted,
    Answered,
    CheckpointBegan,
    CheckpointSaved,
    ClosedShort,
    Completed,
    Consumed,
    Dropped,
    EngineDied,
    EngineRestarted,
    EngineRetired,
    Evaluated,
    EvaluationBegan,
    Event,
    Expired,
    Failed,
    Filtered,
    Finished,
    Interrupted,
    PhaseBegan,
    Published,
    Released,
    Requested,
    Resumed,
    Reused,
    Routed,
    SourceEnded,
    Stalled,
    SyncBegan,
    Synced,
    TaskFetched,
    Truncated,
    UpdateSkipped,
)
from staleflow.explain.ledger_at import LedgerAt
from staleflow.explain.reading import Recording, microseconds

TRAINING = "training"
"""The phase in which waiting counts."""


class NoTraining(msgspec.Struct, tag="no_training", tag_field="state", frozen=True):
    """The training loop has not begun, or has ended."""


class WaitsForBatch(msgspec.Struct, tag="waits_for_batch", tag_field="state", frozen=True):
    """The trainer waits for a batch."""

    batch: int
    since_s: float


class TrainsBatch(msgspec.Struct, tag="trains_batch", tag_field="state", frozen=True):
    """The trainer trains on a batch, or publishes what came of it."""

    batch: int
    since_s: float


Trainer: TypeAlias = NoTraining | WaitsForBatch | TrainsBatch


class Engine:
    """An engine: the version it has confirmed, the one it pulls, the one that an evaluation holds it at, and the number
    of requests it has not answered.

    It is ``down`` from its death until it serves again, and ``closed`` while it takes no request because it syncs.
    """

    def __init__(self) -> None:
        self.version = 0
        self.down = self.closed = False
        self.pulls: int | None = None
        self.held_at: int | None = None
        self.running = 0
        self.idle_since_s = 0.0

    @property
    def held(self) -> bool:
        """Whether an evaluation keeps it from newer weights."""
        return self.held_at == self.version


class Group:
    """A running group: its version, its unfinished members, their attempts, and how many of them do what."""

    def __init__(self, version: int, members: int, admitted_s: float) -> None:
        self.version = version
        self.unfinished = {index: Member(Activity.IN_ROLLOUT, admitted_s) for index in range(members)}
        self.attempts = [0] * members
        self.failures = [0] * members
        self.tally = dict.fromkeys(Activity, 0)
        self.tally[Activity.IN_ROLLOUT] = members


class _Request(msgspec.Struct):
    group: int
    member: int
    attempt: int
    min_version: int
    pinned: bool = False
    engine: int | None = None


class Timeline:
    """A run as of one moment; :meth:`apply` takes in the next event.

    ``tally`` counts the unfinished members of all running groups by what they do, ``queued_versions`` the requests that
    wait for an engine by the least version that may answer them, ``queued_pinned`` those of an evaluation by the only
    one.
    """

    def __init__(self, recording: Recording) -> None:
        self.ledger = LedgerAt(recording)
        self.steps = recording.config.steps
        self.phase = "starting"
        self.trainer: Trainer = NoTraining()
        self.batches_taken = 0
        self.published = 0
        self.engines = [Engine() for _ in range(recording.engines[0])]
        self.groups: dict[int, Group] = {}
        self.tally = dict.fromkeys(Activity, 0)
        self.queued_versions: Counter[int] = Counter()
        self.queued_pinned: Counter[int] = Counter()
        self.task_at_hand = False
        self.source_ended = False
        self._max_attempts = recording.config.max_attempts
        self._requests: dict[str, _Request] = {}

    def apply(self, event: Event) -> None:
        """Take in the next event. The ledger is moved on its own, once for all events of one time."""
        match event:
            case Requested() | Routed() | Answered() | Interrupted() | Dropped():
                self._apply_to_request(event)
            case Admitted() | Finished() | Failed() | Completed() | Filtered() | Aborted() | Expired():
                self._apply_to_group(event)
            case PhaseBegan() | Consumed() | Released() | Published() | CheckpointBegan() | CheckpointSaved():
                self._apply_to_trainer(event)
            case Resumed(engines=engines):
                self._start_again(event.t, engines)
            case TaskFetched():
                self.task_at_hand = True
            case SourceEnded():
                self.source_ended = True
            case SyncBegan() | Synced() | EngineDied() | EngineRestarted() | EngineRetired():
                self._apply_to_engine(event)
            case EvaluationBegan(version=version, engines=held):
                for engine in held:
                    self.engines[engine].held_at = version
            case Evaluated():
                for each in self.engines:
                    each.held_at = None
            case Truncated() | ClosedShort() | Stalled() | UpdateSkipped() | Reused():
                # A member cut short is answered, a group closed short is completed.
                pass
            case _:
                assert_never(event)

    def _apply_to_engine(self, event: SyncBegan | Synced | EngineDied | EngineRestarted | EngineRetired) -> None:
        engine = self.engines[event.engine]
        match event:
            case SyncBegan(version=version, mode=mode):
                engine.pulls, engine.closed = version, mode != "keep"
            case Synced(version=version):
                engine.version, engine.pulls, engine.down, engine.closed = version, None, False, False
            case EngineDied():
                engine.version, engine.pulls, engine.down, engine.closed = 0, None, True, False
            case EngineRestarted():
                engine.down = self.published > 0
            case EngineRetired():
                engine.held_at = None
            case _:
                assert_never(event)

    def _start_again(self, now_s: float, engines: int) -> None:
        """Of another process only the running groups are left; their members start over."""
        self.engines = [Engine() for _ in range(engines)]
        self._requests.clear()
        self.queued_versions.clear()
        self.queued_pinned.clear()
        self.task_at_hand = self.source_ended = False
        for index, group in self.groups.items():
            for member in tuple(group.unfinished):
                group.attempts[member] += 1
                self._move(index, member, Member(Activity.IN_ROLLOUT, now_s))

    def _apply_to_trainer(
        self, event: PhaseBegan | Consumed | Released | Published | CheckpointBegan | CheckpointSaved
    ) -> None:
        match event:
            case PhaseBegan(phase=phase):
                self.phase = phase
                self.trainer = WaitsForBatch(self.batches_taken, event.t) if phase == TRAINING else NoTraining()
            case Consumed(batch=batch):
                self.trainer = TrainsBatch(batch, event.t)
                self.batches_taken = batch + 1
            case Published(version=version):
                self.published = version
                self.trainer = WaitsForBatch(version, event.t) if version < self.steps else NoTraining()
            case CheckpointBegan():
                self.trainer = NoTraining()
            case CheckpointSaved(step=step):
                self.trainer = WaitsForBatch(step, event.t) if step < self.steps else NoTraining()
            case Released():
                # The run ends: nothing asks for this batch again.
                self.trainer = NoTraining()
            case _:
                assert_never(event)

    def _apply_to_group(self, event: Admitted | Finished | Failed | Completed | Filtered | Aborted | Expired) -> None:
        match event:
            case Admitted(group=group, version=version):
                self.task_at_hand = False
                self.groups[group] = Group(version, self.ledger.members, event.t)
                self.tally[Activity.IN_ROLLOUT] += self.ledger.members
            case Finished(group=group, member=member):
                self._move(group, member, None)
            case Failed(group=group, member=member, attempt=attempt):
                if group in self.groups:
                    self.groups[group].attempts[member] = attempt + 1
                    self.groups[group].failures[member] += 1
                    again = self.groups[group].failures[member] < self._max_attempts
                    self._move(group, member, Member(Activity.IN_ROLLOUT, event.t) if again else None)
            case Completed(group=group) | Filtered(group=group) | Aborted(group=group) | Expired(group=group):
                for member in tuple(self.groups[group].unfinished) if group in self.groups else ():
                    self._move(group, member, None)
                self.groups.pop(group, None)
            case _:
                assert_never(event)

    def _apply_to_request(self, event: Requested | Routed | Answered | Interrupted | Dropped) -> None:
        match event:
            case Requested(request=name):
                request = self._request(name)
                self._requests[name] = request
                self._queue(request)[request.min_version] += 1
                self._do(request, Activity.QUEUED, event.t)
            case Routed(request=name, engine=engine):
                request = self._requests[name]
                self._leave_queue(request)
                request.engine = engine
                self.engines[engine].running += 1
                self._do(request, Activity.RUNNING, event.t)
            case Answered(request=name) | Interrupted(request=name) | Dropped(request=name):
                request = self._requests.pop(name)
                if request.engine is None:
                    self._leave_queue(request)
                else:
                    self._free(self.engines[request.engine], event.t)
                self._do(request, Activity.IN_ROLLOUT, event.t)
            case _:
                assert_never(event)

    def _request(self, name: str) -> _Request:
        group, member, attempt, _count = map(int, name.split("."))
        if group in self.groups:
            return _Request(group, member, attempt, self.groups[group].version)
        # Of an evaluation: its attempt is the version that is evaluated.
        return _Request(group, member, attempt, attempt, pinned=True)

    def _queue(self, request: _Request) -> Counter[int]:
        return self.queued_pinned if request.pinned else self.queued_versions

    def _leave_queue(self, request: _Request) -> None:
        queue = self._queue(request)
        queue[request.min_version] -= 1
        if not queue[request.min_version]:
            del queue[request.min_version]

    def _free(self, engine: Engine, now_s: float) -> None:
        engine.running -= 1
        if engine.running == 0:
            engine.idle_since_s = now_s

    def _do(self, request: _Request, what: Activity, now_s: float) -> None:
        group = self.groups.get(request.group)
        # An attempt that was given up may end later than its successor begins.
        if group is not None and group.attempts[request.member] == request.attempt:
            engine = request.engine if what is Activity.RUNNING else None
            self._move(request.group, request.member, Member(what, now_s, engine))

    def _move(self, group: int, index: int, member: Member | None) -> None:
        """Let a member do something else, or nothing more."""
        found = self.groups.get(group)
        before = None if found is None else found.unfinished.pop(index, None)
        if found is None or before is None:
            return
        found.tally[before.what] -= 1
        self.tally[before.what] -= 1
        if member is not None:
            found.unfinished[index] = member
            found.tally[member.what] += 1
            self.tally[member.what] += 1


class Stretch(msgspec.Struct, frozen=True):
    """A time in which nothing changed; ``timeline`` is as of then until the next one is asked for."""

    begin_us: int
    end_us: int
    timeline: Timeline


def stretches(recording: Recording, events: Iterable[Event]) -> Iterator[Stretch]:
    """Cut a run where something changes, from its start to the last event; the last stretch has no length."""
    timeline = Timeline(recording)
    now_us = 0
    for event in events:
        t_us = microseconds(event.t)
        if t_us > now_us:
            timeline.ledger.advance(now_us)
            yield Stretch(now_us, t_us, timeline)
            now_us = t_us
        try:
            timeline.apply(event)
        except (LookupError, ValueError) as error:
            raise RunFolderError(
                f"the event log contradicts itself at {event.t:.6f} s ({type(event).__name__}): it must be whole, from "
                "the start of the run, and beside the config.json it was written with"
            ) from error
    timeline.ledger.advance(now_us)
    yield Stretch(now_us, now_us, timeline)
