"""A consistent cut of a run: what the controller must know to go on after a step as if nothing had happened.

A cut is taken between a publish and whatever comes next, with nothing awaited in between, so all of its parts are of
one instant and no lease is held. It is data: who fills it in and who reads it is for the pipeline to say
(``docs/design/checkpoints.md``).
"""

from typing import Any

import msgspec

from staleflow.errors import CheckpointError
from staleflow.statistics import NOTHING_HAPPENED, Evaluation, FleetStatistics
from staleflow.store import Group, Player
from staleflow.types import Task, TaskData, Trajectory


class GroupCut(msgspec.Struct, frozen=True, kw_only=True):
    """A live group.

    ``data`` is the task's data as bytes. It is kept to be compared with, not to be used: the source hands the task out
    again, with all its types. ``playing`` are the trajectories, so far, of the members that may still finish.
    """

    id: int
    task: int
    data: bytes
    version: int
    admitted_s: float
    finished: list[Trajectory | None]
    attempts: list[int]
    failures: list[int]
    playing: list[Trajectory]
    complete: bool


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What has been measured; ``started_s`` is on the clock of the process, ``t`` and ``noted_s`` count from there.

    ``noted_s`` is the newest time in the ledger's journal.
    """

    started_s: float
    t: float
    noted_s: float
    training_s: float
    trainer_wait_s: float
    rollout_wait_s: float
    staleness_histogram: dict[int, int]
    trajectories: int
    stale_trajectories: int
    reused_tokens: int
    dropped_tokens: int
    evaluations: list[Evaluation]
    skipped_updates: int = 0


class HistorySizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the files of a run folder had been written, in bytes. What is beyond belongs to no history."""

    events_bytes: int
    metrics_bytes: int
    journal_bytes: int


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of the controller. ``cursor`` is the first task that no group has."""

    step: int
    ledger: bytes
    cursor: int
    groups: list[GroupCut]
    failed_attempts: dict[str, int]
    truncated: int
    recorded: Recorded
    history: HistorySizes
    fleet: FleetStatistics = NOTHING_HAPPENED


def task_bytes(task: Task[Any]) -> bytes:
    """The data of a task, equal for equal data in every process; raises :class:`CheckpointError`."""
    try:
        return msgspec.msgpack.encode(task.data, order="deterministic")
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"task {task.id} cannot be part of a checkpoint: {error}; its data is a {type(task.data).__name__}, and "
            "must be made of what msgspec can encode: numbers, text, lists, dicts, dataclasses, msgspec Structs"
        ) from error


def cut_group(group: Group[Any]) -> GroupCut:
    """A live group as it is now."""
    return GroupCut(
        id=group.id,
        task=group.task.id,
        data=task_bytes(group.task),
        version=group.version,
        admitted_s=group.admitted_s,
        finished=list(group.finished),
        attempts=list(group.attempts),
        failures=list(group.failures),
        playing=[_so_far(player) for _, player in sorted(group.players.items())],
        complete=group.complete,
    )


def _so_far(player: Player) -> Trajectory:
    """What is to be kept of an attempt, as it is now; what is added to it later is no part of that."""
    trajectory = player.trajectory
    if player.transcript is not None:
        trajectory = player.transcript.longest(trajectory)
    return msgspec.structs.replace(trajectory, segments=list(trajectory.segments), turns=list(trajectory.turns))


def revive_group(cut: GroupCut, task: Task[TaskData], later_s: float) -> Group[TaskData]:
    """The group as it was, but that nobody plays in it; the clock has moved on by ``later_s``.

    What its unfinished members have said is for :func:`revive_trajectory`.

    Raises :class:`CheckpointError` if the task is another one.
    """
    if task_bytes(task) != cut.data:
        raise CheckpointError(
            f"task {task.id} is not what it was when the checkpoint was saved; resume with the same task source"
        )
    group = Group(cut.id, task, cut.version, len(cut.finished), cut.admitted_s + later_s)
    group.finished = [
        None if trajectory is None else revive_trajectory(trajectory, later_s) for trajectory in cut.finished
    ]
    group.attempts = list(cut.attempts)
    group.failures = list(cut.failures)
    group.complete = cut.complete
    group.lost = 0 if cut.complete else cut.finished.count(None) - len(cut.playing)
    return group


def revive_trajectory(trajectory: Trajectory, later_s: float) -> Trajectory:
    """The trajectory as it was; the clock has moved on by ``later_s``."""
    first_s, finished_s = trajectory.first_segment_s, trajectory.finished_s
    return msgspec.structs.replace(
        trajectory,
        admitted_s=trajectory.admitted_s + later_s,
        first_segment_s=None if first_s is None else first_s + later_s,
        finished_s=None if finished_s is None else finished_s + later_s,
    )
