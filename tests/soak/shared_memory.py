"""What is left in shared memory once its owners are gone."""

import fcntl
import time
from pathlib import Path

FOLDER = Path("/dev/shm")
GRACE_S = 10.0


def contents() -> set[str]:
    """What is there now, by name."""
    return {path.name for path in FOLDER.iterdir()} if FOLDER.is_dir() else set()


def left_behind(before: set[str]) -> list[str]:
    """What was not there before and belongs to nobody, after a while in which others may tidy up."""
    until = time.monotonic() + GRACE_S
    while (left := sorted(name for name in contents() - before if not _has_owner(FOLDER / name))) and (
        time.monotonic() < until
    ):
        time.sleep(0.1)
    return left


def _has_owner(path: Path) -> bool:
    """Whether it is the folder of a parameter server that lives: that holds the lock in it."""
    try:
        with (path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
