"""What comes of a recorded run: how long the trainer and each engine waited, and why.

Sums are kept in whole microseconds, so those per cause add up to the wait.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from staleflow.blockers import Blocker
from staleflow.errors import ConfigError
from staleflow.events import Event
from staleflow.explain.causes import (
    Cause,
    blockers,
    engine_causes,
    first_blocker,
    phrase,
    trainer_cause,
)
from staleflow.explain.reading import MICROSECONDS_PER_S, Recording, microseconds
from staleflow.explain.timeline import Engine, NoTraining, Stretch, Timeline, TrainsBatch, WaitsForBatch, stretches

Watch: TypeAlias = Callable[[list[Event]], Iterable[Event]]
"""Gives the events back one by one, to show how far it is."""


class Waiting(msgspec.Struct, frozen=True):
    """How long somebody waited during training, and for what; ``seconds`` has the longest first."""

    waited_s: float
    seconds: dict[Cause, float]


class TrainerWait(msgspec.Struct, frozen=True):
    """One wait of the trainer. It is not ``over`` if the run, or what is known of it, ends before the batch comes.

    ``cause`` is the one with the most seconds, ``blocker`` the last that accounted for it.
    """

    batch: int
    begin_s: float
    over: bool
    waited_s: float
    seconds: dict[Cause, float]
    cause: Cause
    blocker: Blocker | None

    def __str__(self) -> str:
        why = f"for {self.blocker.reason}" if self.blocker is not None else f"because {phrase(self.cause)}"
        waited = "waited" if self.over else "has waited"
        return f"batch {self.batch} {waited} {self.waited_s:.2f} s {why}"


class Explanation(msgspec.Struct, frozen=True):
    """A run as a whole, as far as it is known; ``waits`` are all waits of the trainer, in order.

    ``training_s`` is from the begin of training to the end of the last step; ``phase`` the last that was entered.
    """

    phase: str
    until_s: float
    steps: int
    published: int
    training_s: float
    trainer: Waiting
    engines: tuple[Waiting, ...]
    waits: tuple[TrainerWait, ...]


class EngineMoment(msgspec.Struct, frozen=True):
    """An engine at one moment; ``cause`` and ``idle_since_s`` are None unless it waits, ``pulls`` unless it syncs."""

    version: int
    pulls: int | None
    running: int
    idle_since_s: float | None
    cause: Cause | None


class Moment(msgspec.Struct, frozen=True):
    """A run at one moment.

    ``cause`` and ``blockers`` say why the trainer waits, if it does; beside the blockers, ``missing_groups`` have to be
    admitted.
    """

    t: float
    phase: str
    trainer: NoTraining | WaitsForBatch | TrainsBatch
    cause: Cause | None
    blockers: tuple[Blocker, ...]
    missing_groups: int
    engines: tuple[EngineMoment, ...]


class _Wait:
    def __init__(self, trainer: WaitsForBatch) -> None:
        self.trainer = trainer
        self.us: Counter[Cause] = Counter()
        self._blockers: dict[Cause, Blocker | None] = {}

    def add(self, stretch: Stretch) -> None:
        cause = trainer_cause(stretch.timeline)
        self.us[cause] += stretch.end_us - stretch.begin_us
        self._blockers[cause] = first_blocker(stretch.timeline, cause)

    def record(self, *, over: bool) -> TrainerWait:
        waiting = _waiting(self.us)
        cause = next(iter(waiting.seconds))
        return TrainerWait(
            batch=self.trainer.batch,
            begin_s=self.trainer.since_s,
            over=over,
            waited_s=waiting.waited_s,
            seconds=waiting.seconds,
            cause=cause,
            blocker=self._blockers[cause],
        )


def explain(recording: Recording, watch: Watch = iter) -> Explanation:
    """Account for every wait of a run."""
    engines: list[Counter[Cause]] = [Counter() for _ in range(max(recording.engines))]
    waits: list[_Wait] = []
    training_us = 0
    for stretch in stretches(recording, watch(recording.events)):
        now, length_us = stretch.timeline, stretch.end_us - stretch.begin_us
        if isinstance(now.trainer, NoTraining) or length_us == 0:
            continue
        training_us += length_us
        for cause, us in zip(engine_causes(now), engines, strict=False):
            if cause is not None:
                us[cause] += length_us
        if isinstance(now.trainer, WaitsForBatch):
            if not waits or waits[-1].trainer != now.trainer:
                waits.append(_Wait(now.trainer))
            waits[-1].add(stretch)
    return Explanation(
        phase=now.phase,
        until_s=stretch.end_us / MICROSECONDS_PER_S,
        steps=now.steps,
        published=now.ledger.facts.published,
        training_s=training_us / MICROSECONDS_PER_S,
        trainer=_waiting(sum((wait.us for wait in waits), Counter())),
        engines=tuple(map(_waiting, engines)),
        waits=tuple(wait.record(over=wait.trainer.batch < now.batches_taken) for wait in waits),
    )


def moment(recording: Recording, at_s: float, watch: Watch = iter) -> Moment:
    """Tell what was going on at one moment; raises :class:`ConfigError` if nothing is known of it."""
    until_us = microseconds(recording.events[-1].t) if recording.events else 0
    if not 0 <= at_s <= until_us / MICROSECONDS_PER_S:
        raise ConfigError(f"no moment {at_s:g} s; the run is known from 0 to {until_us / MICROSECONDS_PER_S:.6f} s")
    at_us = microseconds(at_s)
    for stretch in stretches(recording, watch(recording.events)):
        if stretch.begin_us <= at_us < stretch.end_us:
            break
    return _moment(stretch.timeline, at_s)


def _moment(now: Timeline, at_s: float) -> Moment:
    waits = isinstance(now.trainer, WaitsForBatch)
    trains = not isinstance(now.trainer, NoTraining)
    causes = engine_causes(now) if trains else [None] * len(now.engines)
    return Moment(
        t=at_s,
        phase=now.phase,
        trainer=now.trainer,
        cause=trainer_cause(now) if waits else None,
        blockers=blockers(now) if waits else (),
        missing_groups=now.ledger.facts.missing_groups if waits else 0,
        engines=tuple(map(_engine_moment, now.engines, causes)),
    )


def _engine_moment(engine: Engine, cause: Cause | None) -> EngineMoment:
    return EngineMoment(
        version=engine.version,
        pulls=engine.pulls,
        running=engine.running,
        idle_since_s=None if cause is None else engine.idle_since_s,
        cause=cause,
    )


def _waiting(us: Counter[Cause]) -> Waiting:
    seconds = {cause: cause_us / MICROSECONDS_PER_S for cause, cause_us in us.most_common()}
    return Waiting(us.total() / MICROSECONDS_PER_S, seconds)
