"""Evaluation: the held-out tasks played by one version of the policy, while training goes on beside it or alone.

Data flow. Engines are held at the version, one beside training, all of them otherwise; every held-out task is played
once, by held engines only; then the engines are let go, and what came of it is recorded.

Invariant: every token of an evaluation is of its version. A held engine pulls nothing newer, weights that it still has
to pull stay pullable, and a reply with a token of another version is refused at the door. Held-out rollouts are in no
group: the ledger, the failure limit of training and its figures know nothing of them.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, Generic

from staleflow import clock
from staleflow.config import Config
from staleflow.errors import TooManyFailuresError
from staleflow.events import EvaluationBegan
from staleflow.fleet import Fleet
from staleflow.members import Members
from staleflow.parameter_server.base import ParameterServer
from staleflow.recorder import Recorder
from staleflow.statistics import Evaluation, EvaluationProgress
from staleflow.types import TaskData, Trajectory

EVALUATION_SHARE = 4
"""Beside training, an evaluation takes this part of the engines' room."""


class Evaluations(Generic[TaskData]):
    """The evaluations of a run, one at a time."""

    def __init__(
        self,
        held_out: Sequence[TaskData],
        *,
        config: Config,
        fleet: Fleet,
        weights: ParameterServer,
        members: Members[TaskData],
        recorder: Recorder,
    ) -> None:
        self._held_out = held_out
        self._config = config
        self._fleet = fleet
        self._weights = weights
        self._members = members
        self._recorder = recorder
        self._played: list[Exception | None] = []
        self._version: int | None = None

    @property
    def progress(self) -> EvaluationProgress | None:
        """How far the one that goes on has come; None if none does."""
        if self._version is None:
            return None
        failed = sum(error is not None for error in self._played)
        return EvaluationProgress(self._version, len(self._held_out), len(self._played), failed)

    async def alone(self, version: int) -> None:
        """Evaluate the newest version on all engines, while nothing else is played."""
        if self._held_out:
            await self._begin(version, tuple(range(len(self._fleet.engines))), self._fleet.capacity)

    def beside_training(self, version: int) -> Coroutine[Any, Any, None]:
        """Hold an engine at the newest version, at once; the coroutine evaluates and lets it go.

        Training goes on, on this engine too, but it serves no newer version meanwhile. With one engine alone, training
        comes to wait for the end of the evaluation when the staleness bound allows nothing more of that version.
        """
        engine = self._fleet.least_busy
        at_once = min(self._fleet.capacity // EVALUATION_SHARE, self._fleet.engines[engine].capacity)
        return self._begin(version, (engine,), max(1, at_once))

    def _begin(self, version: int, engines: tuple[int, ...], at_once: int) -> Coroutine[Any, Any, None]:
        held = ExitStack()
        if any(self._fleet.version(engine) < version for engine in engines):
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
        trajectories = [Trajectory(index, 0, index, version, began_s) for index in range(len(self._held_out))]
        # Those that no engine has room for must not queue for one while their deadline runs.
        room = asyncio.Semaphore(at_once)

        async def play(data: TaskData, trajectory: Trajectory) -> None:
            async with room:
                playing = self._members.play_task(data, trajectory, version, pinned=True)
                self._played.append(await _failure_of(playing))

        with held:
            async with asyncio.TaskGroup() as plays:
                for data, trajectory in zip(self._held_out, trajectories, strict=True):
                    plays.create_task(play(data, trajectory))
        self._version = None
        failures = [error for error in self._played if error is not None]
        if len(failures) > self._config.max_failure_share * len(trajectories):
            raise TooManyFailuresError(
                f"{len(failures)} of {len(trajectories)} held-out rollouts failed (max_failure_share is "
                f"{self._config.max_failure_share:g}); the first: {type(failures[0]).__name__}: {failures[0]}"
            ) from failures[0]
        versions = [token for trajectory in trajectories for token in trajectory.versions] or [version]
        self._recorder.evaluated(
            Evaluation(
                step=version,
                reward_mean=sum(trajectory.reward or 0.0 for trajectory in trajectories) / len(trajectories),
                tasks=len(trajectories),
                failed=len(failures),
                versions=(min(versions), max(versions)),
                failures=dict(Counter(type(error).__name__ for error in failures)),
                sampled_tokens=sum(trajectory.sampled_tokens for trajectory in trajectories),
                duration_s=clock.now() - began_s,
            )
        )


async def _failure_of(playing: Awaitable[None]) -> Exception | None:
    try:
        await playing
    except Exception as error:  # noqa: BLE001 - whatever the user's function raises fails its trajectory alone
        return error
    return None
