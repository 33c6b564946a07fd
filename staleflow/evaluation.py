"""Evaluation: the held-out tasks, played to measure by and never trained on.

It plays beside training on the engines that training uses, in a part of their room, and reports to the recorder.
Nothing of it is in the ledger.
"""

import asyncio
from collections.abc import Sequence
from typing import Generic

from staleflow import clock
from staleflow._core import StalenessLedger
from staleflow.config import Config
from staleflow.errors import TooManyFailuresError
from staleflow.fleet import Fleet
from staleflow.members import Members, Spawn
from staleflow.recorder import Recorder
from staleflow.statistics import Evaluation
from staleflow.types import TaskData, Trajectory

EVALUATION_SHARE = 4
"""An evaluation beside training has one in so many of the engines' places."""


class HeldOut(Generic[TaskData]):
    """The held-out tasks of one run, which may be none."""

    def __init__(
        self,
        *,
        tasks: Sequence[TaskData],
        config: Config,
        ledger: StalenessLedger,
        fleet: Fleet,
        members: Members[TaskData],
        recorder: Recorder,
        spawn: Spawn,
    ) -> None:
        self._tasks = tasks
        self._config = config
        self._ledger = ledger
        self._fleet = fleet
        self._members = members
        self._recorder = recorder
        self._spawn = spawn
        self._running: asyncio.Task[None] | None = None

    def begin_if_due(self, version: int) -> None:
        """Evaluate beside training if the version is one to be evaluated, unless an evaluation is still going on."""
        every = self._config.evaluate_every_steps
        due = every is not None and version % every == 0 and version < self._config.steps
        if due and (self._running is None or self._running.done()):
            # A part of the engines' room, so that training goes on beside it.
            at_once = max(1, self._fleet.capacity // EVALUATION_SHARE)
            self._running = self._spawn(self.evaluate(at_once=at_once), "evaluation")

    async def finish(self) -> None:
        """Wait for an evaluation that is going on, and evaluate the last version if that has not been done."""
        if self._running is not None:
            await self._running
        if self._recorder.evaluated_step != self._ledger.published:
            await self.evaluate(at_once=self._fleet.capacity)

    async def evaluate(self, *, at_once: int) -> None:
        """Play every held-out task once, on weights no older than those published now.

        Raises :class:`TooManyFailuresError` where training would: an accuracy of failures means nothing.
        """
        if not self._tasks:
            return
        step = self._ledger.published
        trajectories = [Trajectory(index, 0, index, step, clock.now()) for index in range(len(self._tasks))]
        # Those that no engine has room for must not queue for one while their deadline runs.
        room = asyncio.Semaphore(at_once)

        async def play_one(data: TaskData, trajectory: Trajectory) -> None:
            async with room:
                await self._members.play_task(data, trajectory, step)

        plays = [play_one(*pair) for pair in zip(self._tasks, trajectories, strict=True)]
        failed = [error for error in await asyncio.gather(*plays, return_exceptions=True) if error is not None]
        if len(failed) > self._config.max_failure_share * len(plays):
            raise TooManyFailuresError(
                f"{len(failed)} of {len(plays)} held-out rollouts failed (max_failure_share is "
                f"{self._config.max_failure_share:g}); the first: {type(failed[0]).__name__}: {failed[0]}"
            ) from failed[0]
        versions = [version for trajectory in trajectories for version in trajectory.versions] or [step]
        self._recorder.evaluated(
            Evaluation(
                step=step,
                reward_mean=sum(trajectory.reward or 0.0 for trajectory in trajectories) / len(trajectories),
                tasks=len(trajectories),
                failed=len(failed),
                versions=(min(versions), max(versions)),
            )
        )
