"""Batches that cannot be trained, and updates that must not be made.

A batch is *unfit* if no model of these limits could train on it: it is refused before anything is computed. An update
is *spoilt* if its loss, its gradient or what an engine recorded is not finite: it is not made, the trajectories to
blame are written to a file, and the policy says whether that ends the run.

Invariant: neither changes weights or optimizer.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from staleflow.errors import TrainerError
from staleflow.types import Attempt, ModelLimits, SkippedUpdate, TrainBatch, Trajectory

NonfinitePolicy: TypeAlias = Literal["stop", "skip"]
"""What an update that is not finite does: end the run, or not happen."""

MAX_SKIPPED_IN_A_ROW = 5
"""A trajectory spoils one update. So many in a row mean that the weights or the model are at fault."""
NAMED = 4
"""How many trajectories an error spells out."""


class Spoilt(msgspec.Struct, frozen=True):
    """An update that is not finite: why, and which trajectories of the batch, by their place in it, are to blame."""

    reason: str
    rows: list[int]


class Offender(msgspec.Struct, frozen=True):
    """A trajectory, and the advantage that its group or batch gave it."""

    advantage: float
    trajectory: Trajectory


class Dump(msgspec.Struct, frozen=True):
    """What is written of a spoilt update: enough to compute it again.

    The file is JSON as Python's :mod:`json` reads it, which knows ``NaN``; ``msgspec.convert`` makes it this record.
    """

    step: int
    update: int
    reason: str
    offenders: list[Offender]


# -- before anything is computed --------------------------------------------------------------------------------------


def refuse_unfit(batch: TrainBatch, limits: ModelLimits) -> None:
    """Raise :class:`TrainerError` that names the first thing in a batch that cannot be trained on."""
    if not batch.groups:
        raise TrainerError(f"step {batch.step}: the batch has no groups; nothing was trained")
    for index, group in enumerate(batch.groups):
        if not group:
            raise TrainerError(
                f"step {batch.step}: group number {index} of the batch has no members; nothing was trained"
            )
        for trajectory in group:
            if (defect := _defect(trajectory, limits)) is not None:
                raise TrainerError(
                    f"step {batch.step}: member {trajectory.member} of group {trajectory.group} {defect}; nothing was "
                    "trained"
                )


def _defect(trajectory: Trajectory, limits: ModelLimits) -> str | None:
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        return f"has reward {trajectory.reward}; a reward is a finite number"
    for segment in trajectory.segments:
        counts = len(segment.token_ids), len(segment.logprobs), len(segment.versions)
        if segment.sampled and len(set(counts)) > 1:
            return "has {} sampled tokens with {} logprobs and {} versions; they must be as many".format(*counts)
    if trajectory.sampled_tokens == 0:
        return "has no sampled token, so there is nothing to train on"
    segments = trajectory.trained_segments
    first = next(segment for segment in segments if segment.token_ids)
    if first.sampled:
        return "begins with a sampled token, which nothing predicts: a trajectory begins with a prompt"
    tokens = [token for segment in segments for token in segment.token_ids]
    if limits.max_tokens is not None and len(tokens) > limits.max_tokens:
        return f"has {len(tokens)} tokens; the model takes at most {limits.max_tokens}"
    if limits.vocabulary is not None and not 0 <= min(tokens) <= max(tokens) < limits.vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < limits.vocabulary)
        return f"has token id {wrong} at position {tokens.index(wrong)}; the model's vocabulary has {limits.vocabulary}"
    return None


def unreadable_rows(batch: TrainBatch) -> set[int]:
    """Places of trajectories with a behaviour logprob that is not finite.

    A loss could mask such a token, and train on the rest as if nothing were wrong.
    """
    return {
        row
        for row, trajectory in enumerate(batch.trajectories)
        if not all(math.isfinite(logprob) for segment in trajectory.segments for logprob in segment.logprobs)
    }


# -- updates that are not finite --------------------------------------------------------------------------------------


class NonfiniteUpdates:
    """What becomes of the spoilt updates of one trainer.

    Args:
        policy: whether the first one ends the run, or only :data:`MAX_SKIPPED_IN_A_ROW` of them without a sound one
            between.
        folder: where dumps go; None for none.
    """

    def __init__(self, policy: NonfinitePolicy, folder: Path | None) -> None:
        self._policy = policy
        self._folder = folder
        self._in_a_row = 0

    def refuse_unreadable(self, batch: TrainBatch, rows: set[int], advantages: Sequence[float]) -> None:
        """Raise :class:`TrainerError` if what an engine recorded ends the run; no update of the step has been made."""
        if rows and self._policy == "stop":
            self.spoilt(batch, 0, unreadable(rows), advantages)

    def made(self) -> None:
        """An update was sound."""
        self._in_a_row = 0

    def spoilt(self, batch: TrainBatch, update: int, spoilt: Spoilt, advantages: Sequence[float]) -> SkippedUpdate:
        """Write the offenders down; raises :class:`TrainerError` that names them where the run is to end."""
        offenders = [Offender(advantages[row], batch.trajectories[row]) for row in spoilt.rows]
        skipped = SkippedUpdate(
            update=update,
            reason=spoilt.reason,
            offenders=[_attempt(offender.trajectory) for offender in offenders],
            dump=self._write(Dump(batch.step, update, spoilt.reason, offenders)),
        )
        self._in_a_row += 1
        if self._policy == "stop" or self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainerError(f"step {batch.step}: {describe(skipped)}{self._advice()}")
        return skipped

    def _advice(self) -> str:
        if self._policy == "stop":
            return "; on_nonfinite='skip' would go on without this update"
        return f"; that is {self._in_a_row} updates in a row, so the weights or the model are at fault, not the data"

    def _write(self, dump: Dump) -> str:
        if self._folder is None:
            return "none"
        path = self._folder / f"nonfinite-step-{dump.step}-update-{dump.update}.json"
        try:
            path.write_text(json.dumps(msgspec.to_builtins(dump)))
        except OSError as error:
            # The update is what the user must hear of, with or without its file.
            return f"none, {path} could not be written: {error.strerror}"
        return str(path)


def unreadable(rows: set[int]) -> Spoilt:
    """The verdict on an update with trajectories that an engine has recorded badly."""
    return Spoilt("a behaviour logprob is not finite", sorted(rows))


def describe(skipped: SkippedUpdate) -> str:
    """For people: which update was not made, why, and because of whom."""
    named = ", ".join(
        f"attempt {one.attempt} of member {one.member} of group {one.group} (task {one.task})"
        for one in skipped.offenders[:NAMED]
    )
    more = len(skipped.offenders) - NAMED
    return (
        f"update {skipped.update} was not made: {skipped.reason}; to blame: {named}"
        f"{f' and {more} more' if more > 0 else ''}; dump: {skipped.dump}"
    )


def _attempt(trajectory: Trajectory) -> Attempt:
    return Attempt(trajectory.task, trajectory.group, trajectory.member, trajectory.attempt)
