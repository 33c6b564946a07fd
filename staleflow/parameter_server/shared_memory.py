"""Versions as folders of safetensors files in shared memory, for engines on the same host.

Each version is one immutable folder that appears under its name only when complete. Readers map its files; the trainer
writes the next one beside it. A folder is removed when it is older than the newest ``keep`` and nobody pulls it.

Versions may be pulled from any thread. The lock is held for bookkeeping alone, never while files are read or removed.
A thread of the server's own removes them: to give large files back takes the system as long as to copy them.
"""

import errno
import fcntl
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from staleflow.errors import ConfigError, WeightsError

PREFIX = "staleflow-"


def _shared_memory_folder() -> Path:
    shared_memory = Path("/dev/shm")
    return shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())


class SharedMemoryParameterServer:
    """Published weights in a folder of their own under ``/dev/shm``.

    Args:
        folder: where to create that folder; default ``/dev/shm``, or the temporary folder where there is none.
        keep: newest versions that stay pullable though nobody pulls them.
    """

    def __init__(self, folder: Path | None = None, *, keep: int = 2) -> None:
        if keep < 2:
            raise ConfigError(f"keep is {keep}; at least 2 versions must stay pullable")
        parent = _shared_memory_folder() if folder is None else folder
        _remove_orphans(parent)
        self._folder, self._owner = _owned_folder(parent)
        self._lock = threading.Lock()
        self._keep = keep
        self._published: list[int] = []
        self._pulls: Counter[int] = Counter()
        self._closed = False
        self._removals = ThreadPoolExecutor(1, "weights-remove")

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that can be pulled now, oldest first."""
        return tuple(self._published)

    @contextmanager
    def publishing(self, version: int) -> Iterator[Path]:
        """See :class:`staleflow.parameter_server.base.ParameterServer`; versions must increase."""
        if self._published and version <= self._published[-1]:
            raise ConfigError(f"version {version} published after version {self._published[-1]}")
        self._check_space(version)
        partial = self._folder / f"{version}.partial"
        try:
            partial.mkdir()
            yield partial
            if not any(partial.glob("*.safetensors")):
                raise FileNotFoundError(f"no weights were written for version {version}")
            partial.rename(self._path(version))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise WeightsError(f"version {version} cannot be published in {self._folder}: {error}") from error
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        with self._lock:
            self._published.append(version)
        self._remove_unused()

    @contextmanager
    def pulling(self, version: int) -> Iterator[Path]:
        """See :class:`staleflow.parameter_server.base.ParameterServer`; raises ``KeyError`` when not pullable."""
        with self._lock:
            if version not in self._published:
                raise KeyError(f"version {version} cannot be pulled; versions {self._published} can")
            self._pulls[version] += 1
        try:
            yield self._path(version)
        finally:
            with self._lock:
                self._pulls[version] -= 1
            self._remove_unused()

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        with self._lock:
            self._closed = True
        self._removals.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._owner.close()

    def _path(self, version: int) -> Path:
        return self._folder / str(version)

    def _remove_unused(self) -> None:
        with self._lock:
            unused = [version for version in self._published[: -self._keep] if self._pulls[version] == 0]
            self._published = [version for version in self._published if version not in unused]
            if not self._closed:
                for version in unused:
                    self._removals.submit(shutil.rmtree, self._path(version), ignore_errors=True)

    def _wait_for_removals(self) -> None:
        # One after the other, so that all before this one are over.
        self._removals.submit(lambda: None).result()

    def _check_space(self, version: int) -> None:
        """In shared memory a writer that runs out of space may be killed by a signal that names no reason."""
        if not self._published:
            return
        needed_bytes = sum(path.stat().st_size for path in self._path(self._published[-1]).iterdir())
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            self._wait_for_removals()
            free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            raise WeightsError(
                f"version {version} cannot be published: the one before takes {needed_bytes / 1e6:.0f} MB, and "
                f"{self._folder} has {free_bytes / 1e6:.0f} MB left"
            )


def _owned_folder(parent: Path) -> tuple[Path, IO[bytes]]:
    """A new folder and the lock that says it has an owner, held for the life of this process however it ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = (folder / "lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another controller may have taken the folder for an orphan before it was locked.
        if folder.exists():
            return folder, lock
        lock.close()


def _remove_orphans(parent: Path) -> None:
    """Remove what a controller that was killed has left behind."""
    for lock_path in parent.glob(f"{PREFIX}*/lock"):
        with suppress(OSError), lock_path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
