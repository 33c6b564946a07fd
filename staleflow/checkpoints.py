"""Checkpoints on disk: written beside the last one, put in place when whole, checked before use.

::

    checkpoints/
      40/
        manifest.json        format, step, and size and SHA-256 of every other file
        controller.msgpack   a cut
        trainer/             weights and optimizer, as the trainer writes them
        model/               the weights once more, as a folder that the inference library loads
      60/
      80.partial/            not finished: never read, removed by whoever opens the folder next
      60.replaced/           of an earlier moment of the same step; counts only while there is no ``60/``

Invariant: a folder that has a number for a name is whole and on the disk itself, and so is the part of the run's
history that it continues. It gets its name in one step, after everything in it, and only then may an older one go.
"""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from staleflow._core import StalenessLedger
from staleflow.config import Config
from staleflow.cut import Cut
from staleflow.errors import CheckpointError, ConfigError, SnapshotError
from staleflow.trainer.base import Trainer

FORMAT = 2
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
CONTROLLER = "controller.msgpack"
TRAINER = "trainer"
MODEL = "model"
PARTIAL = ".partial"
REPLACED = ".replaced"


class _Format(msgspec.Struct, frozen=True):
    staleflow_checkpoint: int


class _File(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    staleflow_checkpoint: int
    step: int
    files: dict[str, _File]


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that has been found whole."""

    path: Path
    cut: Cut

    @property
    def run_dir(self) -> Path:
        """The run folder it is part of."""
        return self.path.parent.parent

    @property
    def trainer(self) -> Path:
        """What the trainer has saved."""
        return self.path / TRAINER

    def ledger(self, config: Config) -> StalenessLedger:
        """The ledger, all counters as they were; raises :class:`ConfigError` where ``config`` is not what it obeys."""
        try:
            ledger = StalenessLedger.restore(self.cut.ledger)
        except SnapshotError as error:
            raise CheckpointError(f"checkpoint {self.path} is damaged: {error}") from error
        for name, given, saved in (
            ("batch_size", config.batch_size, ledger.batch_size),
            ("max_staleness", config.max_staleness, ledger.max_staleness),
            ("group_size", config.group_size, ledger.group_size),
            ("extra_groups", config.extra_groups, ledger.extra_groups),
            ("extra_members", config.extra_members, ledger.extra_members),
        ):
            if given != saved:
                raise ConfigError(f"{name} is {given}; it must stay {saved}, as in the run that is resumed")
        return ledger


class Checkpoints:
    """Those of one run.

    Args:
        run_dir: the run folder.
        keep: how many of the newest stay.
    """

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self._folder = run_dir / FOLDER
        self._keep = keep

    def forget_after(self, step: int) -> None:
        """Remove what is not finished, and what continues a history that is not this run's any more."""
        with _writing(self._folder):
            for leftover in (*self._folder.glob(f"*{PARTIAL}"), *_outdated(self._folder)):
                shutil.rmtree(leftover)
            for later in _steps(self._folder):
                if later > step:
                    self._remove(later)

    async def save(self, cut: Cut, trainer: Trainer, history: Sequence[Path], *, best: Sequence[int] = ()) -> None:
        """Write a checkpoint; then remove all but the newest and the first of ``best`` that there is.

        ``history`` are the files whose beginnings belong to the cut. Raises :class:`CheckpointError`, or what the
        trainer raises; then, and when cancelled, the older checkpoints are as they were.
        """
        partial = self._folder / f"{cut.step}{PARTIAL}"
        try:
            with _writing(partial):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                await trainer.save_state(partial / TRAINER)
                await trainer.save(partial / MODEL)
                await asyncio.to_thread(_complete, partial, cut, history)
                # Not in the thread: that goes on when this is cancelled.
                self._put_in_place(partial, cut.step)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        with _writing(self._folder):
            pruning = asyncio.ensure_future(asyncio.to_thread(self._prune, best))
            try:
                await asyncio.shield(pruning)
            except asyncio.CancelledError:
                # Its thread goes on, and nobody else may come to these folders meanwhile.
                await pruning
                raise

    def _put_in_place(self, partial: Path, step: int) -> None:
        """Give a whole checkpoint its name. One that has it, of an earlier moment of the step, is found until then."""
        place = self._folder / str(step)
        if place.exists():
            place.rename(self._folder / f"{step}{REPLACED}")
        partial.rename(place)
        _sync(self._folder)
        for outdated in _outdated(self._folder):
            shutil.rmtree(outdated)

    def _prune(self, best: Sequence[int]) -> None:
        steps = _steps(self._folder)
        kept = {*steps[-self._keep :], *[step for step in best if step in steps][:1]}
        for step in steps:
            if step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # Without its name first, so that it is never found half removed.
        doomed = self._folder / f"{step}{PARTIAL}"
        _place(self._folder, step).rename(doomed)
        shutil.rmtree(doomed)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, given its folder or that of a run, whose newest it then is; checks every byte.

    Raises :class:`CheckpointError` that names what is missing, damaged or foreign.
    """
    folder = _found(path)
    content = _read(folder / MANIFEST)
    try:
        found = msgspec.json.decode(content, type=_Format).staleflow_checkpoint
        if found != FORMAT:
            raise CheckpointError(f"checkpoint {folder} is of format {found}; this version reads format {FORMAT}")
        manifest = msgspec.json.decode(content, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is no manifest of a checkpoint: {error}") from error
    for name, file in manifest.files.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} is missing")
        if _describe(folder / name) != file:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not as it was saved")
    try:
        cut = msgspec.msgpack.decode(_read(folder / CONTROLLER), type=Cut)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder / CONTROLLER} cannot be read: {error}") from error
    if folder.name.removesuffix(REPLACED) != str(cut.step):
        raise CheckpointError(f"checkpoint {folder} is that of step {cut.step}: rename its folder back")
    return Checkpoint(folder, cut)


def newest_step(run_dir: Path) -> int | None:
    """The step of the newest checkpoint of a run; None if there is none."""
    return max(_steps(run_dir / FOLDER), default=None)


def _found(path: Path) -> Path:
    # Followed to its end: the run folder is found from here.
    path = path.resolve()
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist: give the folder of a run, or of one of its checkpoints")
    if (path / MANIFEST).is_file():
        return path
    steps = _steps(path / FOLDER)
    if not steps:
        raise CheckpointError(
            f"{path} holds no checkpoint: give the folder of a run that has saved one (checkpoint_every_steps), or "
            "of one of its checkpoints"
        )
    return _place(path / FOLDER, steps[-1])


def _steps(folder: Path) -> list[int]:
    """The steps of all whole checkpoints, in order."""
    names = {path.name.removesuffix(REPLACED) for path in folder.glob("*")}
    return sorted(int(name) for name in names if name.isdecimal())


def _place(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    place = folder / str(step)
    return place if place.exists() else folder / f"{step}{REPLACED}"


def _outdated(folder: Path) -> list[Path]:
    """Checkpoints that others have replaced."""
    return [path for path in folder.glob(f"*{REPLACED}") if path.with_suffix("").exists()]


def _complete(partial: Path, cut: Cut, history: Sequence[Path]) -> None:
    """Write all that is missing, and wait until the disk has it."""
    (partial / CONTROLLER).write_bytes(msgspec.msgpack.encode(cut))
    names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    manifest = _Manifest(FORMAT, cut.step, {name: _describe(partial / name) for name in names})
    (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    for path in (*history, *partial.rglob("*"), partial):
        _sync(path)


def _describe(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {error.filename or path}: {error.strerror}") from error
