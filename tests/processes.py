"""Which processes there are, for tests of how they end."""

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 60.0


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def until(true: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait until something is true, and fail if it is not in time."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.05)


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended; one that has, and that nobody has waited for, does not live."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int]) -> bool:
    """Whether all of them end before patience does. Ended ones for which nobody has waited count as gone."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    return not any(lives(process) for process in alive)
