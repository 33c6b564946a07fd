"""Evaluation: the held-out tasks played by one version of the policy, while training goes on beside it or alone.

Data flow. Engines are held at the version, one beside training, all of them otherwise; every held-out task is played
once, by held engines only; then the engines are let go, and what came of it is recorded.

Invariant: every token of an evaluation is of its version. A held engine pulls nothing newer, its version stays pullable
in case it dies and comes back, and a reply with a token of another version is refused at the door. Held-out rollouts
are in no group: the ledger, the failure limit of training and its figures know nothing of them.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, Generic

from staleflow import clock
from staleflow._core import StalenessLedger
from staleflow.config import Config
from staleflow.errors import TooManyFailuresError
from staleflow.events import EvaluationBegan
from staleflow.fleet import Fleet
from staleflow.members import Members, Spawn
from staleflow.parameter_server.base import ParameterServer
from staleflow.recorder import Recorder
from staleflow.statistics import Evaluation, EvaluationProgress
from staleflow.types import TaskData, Trajectory

EVALUATION_SHARE = 4
"""Beside training, an evaluation takes this part of the engines' room."""

logger = logging.getLogger("staleflow")


class HeldOut(Generic[TaskData]):
    """The held-out tasks of one run, which may be none, and their evaluations, one at a time."""

    def __init__(
        self,
        *,
        tasks: Sequence[TaskData],
        config: Config,
        ledger: StalenessLedger,
        fleet: Fleet,
        weights: ParameterServer,
        members: Members[TaskData],
        recorder: Recorder,
        spawn: Spawn,
    ) -> None:
        self._tasks = tasks
        self._config = config
        self._ledger = ledger
        self._fleet = fleet
        self._weights = weights
        self._members = members
        self._recorder = recorder
        self._spawn = spawn
        self._running: asyncio.Task[None] | None = None
        self._version: int | None = None
        self._played: list[Exception | None] = []

    @property
    def progress(self) -> EvaluationProgress | None:
        """How far the evaluation that goes on has come; None if none does."""
        if self._version is None:
            return None
        failed = sum(error is not None for error in self._played)
        return EvaluationProgress(self._version, len(self._tasks), len(self._played), failed)

    def begin_if_due(self, version: int) -> None:
        """Evaluate the newest version beside training if it is due, unless an evaluation is still going on.

        Training goes on, on the engine that is held too, but that serves no newer version meanwhile. With one engine
        alone, training comes to wait for the end of the evaluation when the staleness bound allows nothing more of that
        version.
        """
        every = self._config.evaluate_every_steps
        due = every is not None and version % every == 0 and version < self._config.steps
        engine = self._fleet.least_busy
        if due and self._tasks and engine is not None and (self._running is None or self._running.done()):
            at_once = min(self._fleet.capacity // EVALUATION_SHARE, self._fleet.engines[engine].capacity)
            self._running = self._spawn(self._begin(version, (engine,), max(1, at_once)), "evaluation")

    async def finish(self) -> None:
        """Wait for an evaluation that is going on, and evaluate the last version if that has not been done."""
        if self._running is not None:
            await self._running
        if self._recorder.evaluated_step != self._ledger.published:
            await self.alone()

    async def alone(self) -> None:
        """Evaluate the newest version on all engines, while nothing else is played."""
        if self._tasks:
            await self._begin(self._ledger.published, self._fleet.not_retired, self._fleet.capacity)

    def _begin(self, version: int, engines: tuple[int, ...], at_once: int) -> Coroutine[Any, Any, None]:
        """Hold engines at the newest version, at once; the coroutine evaluates and lets them go."""
        held = ExitStack()
        if version > 0:
            held.enter_context(self._weights.pulling(version))
        for engine in engines:
            self._fleet.hold(engine, version)
            held.callback(self._fleet.let_go, engine)
        self._version, self._played = version, []
        self._recorder.event(EvaluationBegan(self._recorder.t(), version, engines))
        return self._evaluate(version, at_once, held)

    async def _evaluate(self, version: int, at_once: int, held: ExitStack) -> None:
        """Play every held-out task once; raises :class:`TooManyFailuresError` where training would: an accuracy of
        failures means nothing."""
        began_s = clock.now()
        trajectories = [Trajectory(index, 0, index, version, began_s) for index in range(len(self._tasks))]
        # Those that no engine has room for must not queue for one while their deadline runs.
        room = asyncio.Semaphore(at_once)

        async def play(data: TaskData, trajectory: Trajectory) -> None:
            async with room:
                playing = self._members.play_task(data, trajectory, version, pinned=True)
                self._played.append(await _failure_of(playing))

        with held:
            async with asyncio.TaskGroup() as plays:
                for data, trajectory in zip(self._tasks, trajectories, strict=True):
                    plays.create_task(play(data, trajectory))
            given_up = not self._fleet.holds(version)
        self._version = None
        if given_up:
            logger.warning("version %d is not evaluated: the engine that was held at it has died for good", version)
            return
        self._recorder.evaluated(self._measured(version, trajectories, began_s))

    def _measured(self, version: int, trajectories: Sequence[Trajectory], began_s: float) -> Evaluation:
        failures = [error for error in self._played if error is not None]
        if len(failures) > self._config.max_failure_share * len(trajectories):
            raise TooManyFailuresError(
                f"{len(failures)} of {len(trajectories)} held-out rollouts failed (max_failure_share is "
                f"{self._config.max_failure_share:g}); the first: {type(failures[0]).__name__}: {failures[0]}"
            ) from failures[0]
        versions = [token for trajectory in trajectories for token in trajectory.versions] or [version]
        return Evaluation(
            step=version,
            reward_mean=sum(trajectory.reward or 0.0 for trajectory in trajectories) / len(trajectories),
            tasks=len(trajectories),
            failed=len(failures),
            versions=(min(versions), max(versions)),
            failures=dict(Counter(type(error).__name__ for error in failures)),
            sampled_tokens=sum(trajectory.sampled_tokens for trajectory in trajectories),
            duration_s=clock.now() - began_s,
        )


async def _failure_of(playing: Awaitable[None]) -> Exception | None:
    try:
        await playing
    except Exception as error:  # noqa: BLE001 - whatever the user's function raises fails its trajectory alone
        return error
    return None
