"""Between the parts of a run and its checkpoints: what each part gives to a cut, and what it gets back from one.

A cut is data (:mod:`staleflow.cut`), and how it lies on disk is for :mod:`staleflow.checkpoints` to say; here is known
which part holds what (``docs/design/checkpoints.md``).
"""

from typing import Any, Generic

from staleflow._core import StalenessLedger
from staleflow.checkpoints import Checkpoint, Checkpoints
from staleflow.cut import Cut, cut_group, revive_group, revive_trajectory
from staleflow.errors import ConfigError
from staleflow.events import CheckpointBegan, CheckpointSaved
from staleflow.fleet import Fleet
from staleflow.members import Members
from staleflow.parameter_server.base import ParameterServer
from staleflow.recorder import Recorder
from staleflow.rollouts import Rollouts
from staleflow.run_folder import RunFolder
from staleflow.store import TrajectoryStore
from staleflow.tasks import ResumableTaskSource, TaskSource, hand_out_again
from staleflow.trainer.base import Trainer
from staleflow.types import TaskData


class Checkpointing(Generic[TaskData]):
    """Saves checkpoints of one run, and makes its parts what they were at one."""

    def __init__(
        self,
        *,
        checkpoints: Checkpoints,
        tasks: TaskSource[TaskData],
        trainer: Trainer,
        ledger: StalenessLedger,
        store: TrajectoryStore[TaskData],
        fleet: Fleet,
        weights: ParameterServer,
        recorder: Recorder,
        members: Members[TaskData],
        rollouts: Rollouts[TaskData],
        folder: RunFolder,
    ) -> None:
        self._checkpoints = checkpoints
        self._tasks = tasks
        self._trainer = trainer
        self._ledger = ledger
        self._store = store
        self._fleet = fleet
        self._weights = weights
        self._recorder = recorder
        self._members = members
        self._rollouts = rollouts
        self._folder = folder

    def cut(self) -> Cut:
        """The controller as it is now, right after a publish."""
        return Cut(
            step=self._ledger.published,
            ledger=self._ledger.snapshot(),
            cursor=self._rollouts.cursor,
            groups=[cut_group(group) for group in self._store.groups],
            failed_attempts=dict(self._members.failures.by_cause),
            truncated=self._members.truncated,
            recorded=self._recorder.cut(),
            history=self._folder.sizes(),
            fleet=self._fleet.statistics(),
        )

    async def save(self, cut: Cut) -> None:
        """Write a checkpoint with the trainer's state as it is; raises what :meth:`Checkpoints.save` raises."""
        self._recorder.event(CheckpointBegan(self._recorder.t(), cut.step))
        await self._checkpoints.save(cut, self._trainer, self._folder.history, best=self._recorder.best_steps)
        self._recorder.event(CheckpointSaved(self._recorder.t(), cut.step))

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Make every part what it was at the cut; what members had not finished is played again."""
        cut = checkpoint.cut
        tasks = await hand_out_again(resumable(self._tasks), (group.task for group in cut.groups), cursor=cut.cursor)
        await self._trainer.load_state(checkpoint.trainer)
        with self._weights.publishing(cut.step) as weights:
            await self._trainer.publish(weights)
        await self._rollouts.sync_all(cut.step)
        self._rollouts.cursor = cut.cursor
        self._fleet.resume(cut.fleet)
        self._members.truncated = cut.truncated
        self._members.failures.by_cause.update(cut.failed_attempts)
        later_s = self._recorder.started_s - cut.recorded.started_s
        for group in cut.groups:
            playing = [revive_trajectory(trajectory, later_s) for trajectory in group.playing]
            self._members.resume(revive_group(group, tasks[group.task], later_s), playing)


def resumable(tasks: TaskSource[Any]) -> ResumableTaskSource[Any]:
    """The source, if checkpoints can be made with it; raises :class:`ConfigError`."""
    if not isinstance(tasks, ResumableTaskSource):
        raise ConfigError(
            f"tasks is a {type(tasks).__name__} without a cursor, so a run on it cannot be resumed: give it "
            "one (staleflow.ResumableTaskSource), or leave checkpoint_every_steps at None"
        )
    return tasks
