"""Why somebody waits: the rules, as pure functions of the picture at one moment.

Invariant: each rule gives exactly one cause, whatever the picture. ``docs/design/explain.md`` says why these.
"""

from enum import StrEnum
from typing import assert_never

from staleflow.blockers import Activity, Blocker, blocker, longest_at, prevailing
from staleflow.explain.timeline import Engine, Group, NoTraining, Timeline, TrainsBatch, WaitsForBatch


class Cause(StrEnum):
    """Why the trainer or an engine waits. An engine never waits for QUEUED or NO_ROOM: it is where the room is."""

    GENERATION = "generation"
    """What is waited for is being sampled; if an engine waits, by the others."""
    QUEUED = "queued"
    """What is waited for waits for an engine."""
    ROLLOUT_FUNCTION = "rollout_function"
    """What is waited for is in the user's function: environment, tools, reward."""
    NO_ROOM = "no_room"
    """Too few groups are admitted, and the engines have no room for another."""
    SYNC = "sync"
    """Work is at hand that needs the published weights, and no engine that could do it has confirmed them."""
    ENGINE_DOWN = "engine_down"
    """The engine is dead, or has started again and confirmed no published version yet; if the trainer waits, every
    engine is."""
    EVALUATION = "evaluation"
    """Work is at hand that needs newer weights than the version an evaluation holds the engine at, or all of them."""
    STALENESS_BOUND = "staleness_bound"
    """The trainer works, and every group that the bound allows is admitted."""
    NO_TASK = "no_task"
    """The task source is awaited."""
    SOURCE_ENDED = "source_ended"
    """The task source has no more."""
    NOTHING_LEFT = "nothing_left"
    """The rest of the run needs no more groups than are admitted."""
    CONTROLLER = "controller"
    """Nothing is in the way: the controller, or its coordination policy, has yet to act."""


def phrase(cause: Cause) -> str:
    """The cause, for people."""
    match cause:
        case Cause.GENERATION:
            return "members are still being generated"
        case Cause.QUEUED:
            return "requests wait for an engine"
        case Cause.ROLLOUT_FUNCTION:
            return "rollout functions are at work"
        case Cause.NO_ROOM:
            return "the engines have no room for another group"
        case Cause.SYNC:
            return "the published weights are still being pulled"
        case Cause.ENGINE_DOWN:
            return "an engine died and does not serve again yet"
        case Cause.EVALUATION:
            return "an evaluation holds the engine at its version"
        case Cause.STALENESS_BOUND:
            return "the staleness bound allows no further group"
        case Cause.NO_TASK:
            return "no task is at hand"
        case Cause.SOURCE_ENDED:
            return "the task source has no more"
        case Cause.NOTHING_LEFT:
            return "the rest of the run needs no further group"
        case Cause.CONTROLLER:
            return "the controller has yet to act"
        case _:
            assert_never(cause)


def trainer_cause(now: Timeline) -> Cause:
    """Why the trainer has no batch, given that it waits for one."""
    facts = now.ledger.facts
    if facts.ready:
        return Cause.CONTROLLER
    if facts.missing_groups > 0:
        return _why_too_few_groups(now)
    groups = [group for _, group in _blocking_groups(now)]
    tally = {activity: sum([group.tally[activity] for group in groups]) for activity in now.tally}
    if not any(tally.values()):
        return Cause.CONTROLLER
    cause = _by_activity(prevailing(tally))
    return Cause.ENGINE_DOWN if cause is Cause.QUEUED and all(engine.down for engine in now.engines) else cause


def engine_causes(now: Timeline) -> list[Cause | None]:
    """Why each engine is idle; None for those that run something."""
    if all(engine.running for engine in now.engines):
        return [None] * len(now.engines)
    return [None if engine.running else _why_idle(now, engine) for engine in now.engines]


def admission_obstacle(now: Timeline) -> Cause | None:
    """What is in the way of another group, room aside."""
    facts = now.ledger.facts
    if (now.steps - facts.next_batch) * now.ledger.groups_per_batch <= facts.live_groups:
        return Cause.NOTHING_LEFT
    if now.source_ended and not now.task_at_hand:
        return Cause.SOURCE_ENDED
    open_versions = [engine.version for engine in now.engines if not (engine.down or engine.closed)]
    if not open_versions:
        return Cause.ENGINE_DOWN if all(engine.pulls is None for engine in now.engines) else Cause.SYNC
    if not now.ledger.grants(max(open_versions)):
        if not now.ledger.grants(facts.published):
            return Cause.STALENESS_BOUND
        return Cause.EVALUATION if all(engine.held for engine in now.engines) else Cause.SYNC
    return None if now.task_at_hand else Cause.NO_TASK


def blockers(now: Timeline) -> tuple[Blocker, ...]:
    """The groups that the next batch waits for, those due first in front."""
    batch = now.ledger.facts.next_batch
    groups = _blocking_groups(now)
    return tuple(blocker(batch, group, found.unfinished) for group, found in groups if found.unfinished)


def first_blocker(now: Timeline, cause: Cause) -> Blocker | None:
    """A member that accounts for this cause of the trainer's wait; None if the cause is not about members."""
    activity = _ACTIVITIES.get(cause)
    if activity is None:
        return None
    for group, found in _blocking_groups(now):
        if found.tally[activity]:
            return longest_at(activity, now.ledger.facts.next_batch, group, found.unfinished)
    return None


def _why_idle(now: Timeline, engine: Engine) -> Cause:
    if (cause := _why_it_takes_none(engine)) is not None:
        return cause
    of_evaluation = engine.held and engine.version in now.queued_pinned
    if of_evaluation or any(version <= engine.version for version in now.queued_versions):
        return Cause.CONTROLLER
    if now.queued_versions:
        return Cause.EVALUATION if engine.held else Cause.SYNC
    if engine.held_at in now.queued_pinned:
        return Cause.SYNC
    return _why_no_request(now)


def _why_it_takes_none(engine: Engine) -> Cause | None:
    if engine.down:
        return Cause.ENGINE_DOWN if engine.pulls is None else Cause.SYNC
    return Cause.SYNC if engine.closed else None


def _why_no_request(now: Timeline) -> Cause:
    obstacle = admission_obstacle(now)
    match obstacle:
        case Cause.STALENESS_BOUND:
            return _why_no_place_is_free(now)
        case Cause.NOTHING_LEFT | Cause.SOURCE_ENDED:
            # A member in its rollout function may still ask for more.
            return Cause.ROLLOUT_FUNCTION if now.tally[Activity.IN_ROLLOUT] else obstacle
        case None:
            return _by_activity(prevailing(now.tally)) if now.groups else Cause.CONTROLLER
        case _:
            return obstacle


def _blocking_groups(now: Timeline) -> list[tuple[int, Group]]:
    return [(group, now.groups[group]) for group in now.ledger.facts.blockers if group in now.groups]


def _why_too_few_groups(now: Timeline) -> Cause:
    obstacle = admission_obstacle(now)
    if obstacle is not None:
        return obstacle
    if not now.groups:
        return Cause.CONTROLLER
    # Members take up room until they have finished, on an engine or not.
    in_rollout = prevailing(now.tally) is Activity.IN_ROLLOUT
    return Cause.ROLLOUT_FUNCTION if in_rollout else Cause.NO_ROOM


def _why_no_place_is_free(now: Timeline) -> Cause:
    match now.trainer:
        case WaitsForBatch():
            # Both wait for the same: a batch that is taken makes room in the window.
            return trainer_cause(now)
        case TrainsBatch() | NoTraining():
            return Cause.STALENESS_BOUND
        case _:
            assert_never(now.trainer)


def _by_activity(activity: Activity) -> Cause:
    match activity:
        case Activity.RUNNING:
            return Cause.GENERATION
        case Activity.QUEUED:
            return Cause.QUEUED
        case Activity.IN_ROLLOUT:
            return Cause.ROLLOUT_FUNCTION
        case _:
            assert_never(activity)


_ACTIVITIES = {_by_activity(activity): activity for activity in Activity}
