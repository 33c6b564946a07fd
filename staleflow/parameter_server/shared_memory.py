"""Versions as folders of safetensors files in shared memory, for engines on the same host.

Each version is one immutable folder that appears under its name only when complete. Readers map its files; the trainer
writes the next one beside it. A folder is removed when it is older than the newest ``keep`` and nobody pulls it.
"""

import fcntl
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from staleflow.errors import ConfigError

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
        self._folder, self._lock = _owned_folder(parent)
        self._keep = keep
        self._published: list[int] = []
        self._pulls: Counter[int] = Counter()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that can be pulled now, oldest first."""
        return tuple(self._published)

    @contextmanager
    def publishing(self, version: int) -> Iterator[Path]:
        """See :class:`staleflow.parameter_server.base.ParameterServer`; versions must increase."""
        if self._published and version <= self._published[-1]:
            raise ConfigError(f"version {version} published after version {self._published[-1]}")
        partial = self._folder / f"{version}.partial"
        partial.mkdir()
        try:
            yield partial
            if not any(partial.glob("*.safetensors")):
                raise FileNotFoundError(f"no weights were written for version {version}")
            partial.rename(self._path(version))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._published.append(version)
        self._remove_unused()

    @contextmanager
    def pulling(self, version: int) -> Iterator[Path]:
        """See :class:`staleflow.parameter_server.base.ParameterServer`; raises ``KeyError`` when not pullable."""
        if version not in self._published:
            raise KeyError(f"version {version} cannot be pulled; versions {self._published} can")
        self._pulls[version] += 1
        try:
            yield self._path(version)
        finally:
            self._pulls[version] -= 1
            self._remove_unused()

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _path(self, version: int) -> Path:
        return self._folder / str(version)

    def _remove_unused(self) -> None:
        for version in self._published[: -self._keep]:
            if self._pulls[version] == 0:
                shutil.rmtree(self._path(version), ignore_errors=True)
                self._published.remove(version)


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
