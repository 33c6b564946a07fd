"""The run folder: everything a run leaves behind.

``config.json``, ``events.jsonl``, ``metrics.jsonl``, ``ledger.journal`` (every change of the ledger, for
``StalenessLedger.replay``), ``logs/`` of the children, ``checkpoint/``, and what the caller adds. A folder belongs to
one run. Every failure to write is a :class:`RunFolderError` that names file and reason.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from staleflow.errors import RunFolderError
from staleflow.events import Event

BUFFER_BYTES = 1 << 20


class RunFolder:
    """An open run folder; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = False
        with self._writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if (path / "config.json").exists():
                raise RunFolderError(f"run folder {path} already holds a run; choose another with run_dir")
            self.logs.mkdir(exist_ok=True)
            # Buffered, so that an event costs no system call; flushed at every step.
            self._events: IO[bytes] = (path / "events.jsonl").open("wb", buffering=BUFFER_BYTES)
            self._metrics: IO[bytes] = (path / "metrics.jsonl").open("wb", buffering=BUFFER_BYTES)
            self._journal: IO[bytes] = (path / "ledger.journal").open("wb", buffering=BUFFER_BYTES)
        self._encoder = msgspec.json.Encoder()
        self._line = bytearray()

    @property
    def logs(self) -> Path:
        """Folder of the children's output."""
        return self.path / "logs"

    @property
    def checkpoint(self) -> Path:
        """Folder of the newest checkpoint; exists once one has been saved."""
        return self.path / "checkpoint"

    def write_json(self, name: str, content: object) -> None:
        """Write a whole JSON file, indented."""
        path = self.path / name
        with self._writing(path):
            path.write_bytes(msgspec.json.format(self._encoder.encode(content), indent=2) + b"\n")

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
