"""What the controller asks of a rank and what a rank answers, whichever wire is between them.

Every call goes to all ranks, and every rank answers it once, in order. The first message to a rank is
:class:`staleflow.trainer.local.TrainerSettings`; its answer, of call 0, says that the model is loaded.
"""

from typing import TypeAlias

import msgspec

from staleflow.types import ModelLimits, StepMetrics, TrainBatch


class Step(msgspec.Struct, tag=True, frozen=True):
    """Train on a batch."""

    call: int
    batch: TrainBatch


class Publish(msgspec.Struct, tag=True, frozen=True):
    """Write the rank's share of the weights into a folder."""

    call: int
    weights: str


class Save(msgspec.Struct, tag=True, frozen=True):
    """Write a folder that transformers loads."""

    call: int
    folder: str


class SaveState(msgspec.Struct, tag=True, frozen=True):
    """Write all that training goes on from to a new folder."""

    call: int
    folder: str


class LoadState(msgspec.Struct, tag=True, frozen=True):
    """Go on from what was written."""

    call: int
    folder: str


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The call has been carried out; ``error`` says why it could not be, by a rank that can take the next one.

    ``limits`` are those of the loaded model; ``note`` is something that the user should know.
    """

    call: int
    limits: ModelLimits | None = None
    metrics: StepMetrics | None = None
    error: str | None = None
    note: str | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The last word of a rank that an exception ends; ``at_ns`` is the time since the epoch on its machine."""

    at_ns: int
    traceback: str


Call: TypeAlias = Step | Publish | Save | SaveState | LoadState
FromRank: TypeAlias = Answer | Failed
