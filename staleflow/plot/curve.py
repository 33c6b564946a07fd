"""What there is to draw of a run, read from its folder; the run may still go on or have been killed."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import msgspec

from staleflow.errors import RunFolderError
from staleflow.events import Evaluated

Record = TypeVar("Record")
EVALUATED = b'{"event":"evaluated"'
"""How such a line of the event log begins; there are far more others, not worth decoding."""


class Step(msgspec.Struct, frozen=True):
    """What is drawn of a line of ``metrics.jsonl``; ``t`` is in seconds since the start of the run."""

    step: int
    t: float
    reward_mean: float
    staleness_mean: float
    staleness_max: int


class Curve(msgspec.Struct, frozen=True):
    """The steps of a run, at least one, and its evaluations."""

    label: str
    steps: list[Step]
    evaluations: list[Evaluated]


def read_curve(folder: Path, label: str) -> Curve:
    """Read a run folder; raises :class:`RunFolderError` where it is none, or no step has been trained."""
    steps = list(_records(folder / "metrics.jsonl", Step))
    if not steps:
        raise RunFolderError(f"run folder {folder} has no step yet: there is nothing to draw before the first one")
    return Curve(label, steps, list(_records(folder / "events.jsonl", Evaluated, begins=EVALUATED)))


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Each value's mean with those before it, ``window`` in all, or as many as there are."""
    sums = list(accumulate(values, initial=0.0))
    begins = [max(0, end - window) for end in range(1, len(sums))]
    return [(sums[end] - sums[begin]) / (end - begin) for end, begin in enumerate(begins, start=1)]


def _records(path: Path, kind: type[Record], *, begins: bytes = b"") -> Iterator[Record]:
    """The lines that begin like this; one that is still being written is left out."""
    decoder = msgspec.json.Decoder(kind)
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.startswith(begins) and line.endswith(b"\n"):
                    yield _decoded(decoder, line, f"{path}, line {number}")
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(f"{path} does not exist: give the folder of a run, for instance runs/<date>") from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error


def _decoded(decoder: "msgspec.json.Decoder[Record]", line: bytes, place: str) -> Record:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{place} cannot be read: {error}; restore it from a copy") from error
