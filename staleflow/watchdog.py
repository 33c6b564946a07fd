"""The watchdog: tells of a run that has come to a standstill, with all that is needed to see why.

Two alarms, one policy (``StallAlarm``: at the limit, again at every doubling, and when it is over). *Nothing completes*
is noticed on the event loop, by its clock. *The event loop is blocked* is noticed by a thread outside of the
interpreter (``LoopWatch``), to which the loop gives a sign of life every second, with what the run is waiting for.
Each stall has one file in ``stalls/`` of the run folder, and stderr says the same. The run itself goes on.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from staleflow import clock
from staleflow._core import LoopWatch, StallAlarm
from staleflow.events import Stalled
from staleflow.recorder import Recorder
from staleflow.run_folder import RunFolder
from staleflow.stall_report import task_stacks, thread_stacks

BEAT_S = 1.0
BEATS_PER_LIMIT = 4
"""At least so many signs of life in the time that a stall takes to be one."""

logger = logging.getLogger("staleflow")


class Watched(Protocol):
    """What the watchdog asks a run. Both are asked every second, and ``waits_for`` from any thread."""

    def progress(self) -> tuple[int, ...] | None:
        """How far it has come, greater whenever something has completed; None while nothing is to."""

    def waits_for(self) -> str:
        """A sentence on what everything waits for."""


class Watchdog:
    """Watches one run.

    Args:
        run: what to watch.
        limit_s: how long it may stand still without a word.
        folder: where reports go.
        recorder: told of every stall that the event loop sees.
    """

    def __init__(self, run: Watched, *, limit_s: float, folder: RunFolder, recorder: Recorder) -> None:
        self._run = run
        self._limit_s = limit_s
        self._folder = folder
        self._recorder = recorder
        self._alarm = StallAlarm(limit_s)
        self._furthest: tuple[int, ...] | None = None
        self._moved_s = self._since = 0.0

    async def run(self) -> None:
        """Watch until cancelled. Raises :class:`RunFolderError` where a report cannot be written."""
        period_s = min(BEAT_S, self._limit_s / BEATS_PER_LIMIT)
        account = partial(_account, asyncio.get_running_loop(), self._run.waits_for)
        loop_watch = LoopWatch(self._limit_s, period_s, self._folder.stalls, account)
        self._moved_s = clock.now()
        try:
            while True:
                loop_watch.beat(self._recorder.t(), self._run.waits_for())
                due_s = clock.now() + period_s
                await asyncio.sleep(period_s)
                # The time in which the loop did not run is the other alarm's.
                self._moved_s += max(0.0, clock.now() - due_s)
                self._check(account)
        finally:
            loop_watch.stop()

    def _check(self, account: Callable[[], str]) -> None:
        progress = self._run.progress()
        stood_still_s = clock.now() - self._moved_s
        if progress is None or self._furthest is None or progress > self._furthest:
            if self._alarm.moves():
                self._tell(f"over: the run goes on, after {stood_still_s:.1f} s\n")
            self._furthest, self._moved_s = progress, clock.now()
            self._since = self._recorder.t()
        elif self._alarm.stands_still(stood_still_s):
            self._recorder.event(Stalled(self._recorder.t()))
            self._recorder.flush()
            self._tell(f"nothing has completed for {stood_still_s:.1f} s: {account()}\n")

    def _tell(self, text: str) -> None:
        logger.warning("%s", text)
        self._folder.stall(f"{self._since:08.1f}s-nothing-completes.txt", text)


def _account(event_loop: asyncio.AbstractEventLoop, waits_for: Callable[[], str]) -> str:
    return f"{waits_for()}\n\n# tasks of the event loop\n\n{task_stacks(event_loop)}\n# threads\n\n{thread_stacks()}"
