"""The run folder: everything a run leaves behind.

``config.json``, ``events.jsonl``, ``metrics.jsonl``, ``ledger.journal`` (every change of the ledger, for
``StalenessLedger.replay``), ``logs/`` of the children, ``stalls/`` (the watchdog's reports), ``checkpoint/``,
``checkpoints/``, and what the caller adds. A folder belongs to one run, which one process at a time goes on with. Every
failure to write is a :class:`RunFolderError` that names file and reason.
"""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from staleflow.cut import HistorySizes
from staleflow.errors import RunFolderError
from staleflow.events import Event

BUFFER_BYTES = 1 << 20


class RunFolder:
    """An open run folder; a context manager.

    Args:
        path: where it is.
        resumes: how much there is of the run to go on with; None for a new run.
    """

    def __init__(self, path: Path, resumes: HistorySizes | None = None) -> None:
        self.path = path
        self._failed = False
        with self._writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if resumes is None and (path / "config.json").exists():
                raise RunFolderError(
                    f"run folder {path} already holds a run; choose another with run_dir, or go on with it with resume"
                )
            self.logs.mkdir(exist_ok=True)
            sizes = resumes or HistorySizes(events_bytes=0, metrics_bytes=0, journal_bytes=0)
            with ExitStack() as opened:
                self._events = opened.enter_context(self._open("events.jsonl", sizes.events_bytes))
                self._metrics = opened.enter_context(self._open("metrics.jsonl", sizes.metrics_bytes))
                self._journal = opened.enter_context(self._open("ledger.journal", sizes.journal_bytes))
                opened.pop_all()
        self._encoder = msgspec.json.Encoder()
        self._line = bytearray()

    @property
    def logs(self) -> Path:
        """Folder of the children's output."""
        return self.path / "logs"

    @property
    def stalls(self) -> Path:
        """Folder of the watchdog's reports; exists once there is one."""
        return self.path / "stalls"

    @property
    def checkpoint(self) -> Path:
        """Folder of the newest checkpoint; exists once one has been saved."""
        return self.path / "checkpoint"

    @property
    def history(self) -> tuple[Path, ...]:
        """The files that only grow."""
        return tuple(self.path / name for name in ("events.jsonl", "metrics.jsonl", "ledger.journal"))

    def sizes(self) -> HistorySizes:
        """How much has been written of each."""
        return HistorySizes(
            events_bytes=self._events.tell(), metrics_bytes=self._metrics.tell(), journal_bytes=self._journal.tell()
        )

    def write_json(self, name: str, content: object) -> None:
        """Write a whole JSON file, indented."""
        path = self.path / name
        with self._writing(path):
            path.write_bytes(msgspec.json.format(self._encoder.encode(content), indent=2) + b"\n")

    def stall(self, name: str, report: str) -> None:
        """Append to the report of a stall."""
        path = self.stalls / name
        with self._writing(path):
            self.stalls.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(report)

    def event(self, event: Event) -> None:
        """Append to the event log."""
        self._append(self._events, event)

    def journal(self, changes: bytes) -> None:
        """Append to the journal of the ledger."""
        self._write(self._journal, changes)

    def metrics(self, record: msgspec.Struct) -> None:
        """Append to the metrics."""
        self._append(self._metrics, record)

    def flush(self) -> None:
        """Bring all files up to date on disk."""
        with self._writing(self.path):
            self._events.flush()
            self._journal.flush()
            self._metrics.flush()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # All of them, even if one cannot write what it still holds.
            with self._writing(self.path), self._metrics, self._journal, self._events:
                pass
        except RunFolderError:
            # The first error is the one to show.
            if error is None:
                raise

    def _open(self, name: str, size_bytes: int) -> IO[bytes]:
        """A file that goes on after so many bytes; changes nothing if another process is writing to it."""
        path = self.path / name
        # Buffered, so that an event costs no system call; flushed at every step.
        file = path.open("ab", buffering=BUFFER_BYTES)
        try:
            # Held for as long as this process lives, however it ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.tell() < size_bytes:
                raise RunFolderError(f"{path} is shorter than when the checkpoint was saved; restore it from a copy")
            file.truncate(size_bytes)
            file.seek(size_bytes)
        except BlockingIOError:
            file.close()
            raise RunFolderError(f"run folder {self.path} belongs to a run that still goes on") from None
        except BaseException:
            file.close()
            raise
        return file

    def _append(self, file: IO[bytes], record: msgspec.Struct) -> None:
        self._encoder.encode_into(record, self._line)
        self._line += b"\n"
        self._write(file, self._line)

    def _write(self, file: IO[bytes], content: bytes | bytearray) -> None:
        if self._failed:
            return
        with self._writing(self.path):
            file.write(content)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Raised once; while the run winds down there is nowhere left to write to.
            self._failed = True
            raise RunFolderError(f"run folder: cannot write {error.filename or path}: {error.strerror}") from error
