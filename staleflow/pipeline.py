"""The pipeline: every part, wired once.

::

    tasks -> trajectory store -> coordinator --commands--> engines -> rewards -> staleness ledger -> trainer
                  ^                  ^                      |  |  ^                                    |
                  +---- partials ----|----------------------+  |  +--- pull --- parameter server <-publish
                                     +------- snapshot --------+

Data flow. Left of the ledger, :mod:`staleflow.rollouts` turns tasks into groups and :mod:`staleflow.members` plays them
until they are complete. Right of it, the training loop here waits until the ledger has a batch, trains, publishes and,
now and then, saves a checkpoint. All of it lives in one ``TaskGroup``: the first failure ends everything and is what
the caller sees.

Invariant: the ledger is told of every change of state at the moment it happens, with nothing awaited in between, so
its law (``docs/design/ledger.md``) holds at every instant of the run.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Generic, NoReturn

from staleflow import clock
from staleflow._core import StalenessLedger
from staleflow.blockers import Blocker
from staleflow.checkpoints import Checkpoint, Checkpoints, open_checkpoint
from staleflow.config import Config
from staleflow.coordinator import Coordinator, LeastLoad
from staleflow.cut import Cut, cut_group, revive_group
from staleflow.engines.base import Engine
from staleflow.errors import ConfigError, LedgerError, RunFolderError, TooManyFailuresError
from staleflow.events import CheckpointBegan, CheckpointSaved, Consumed, PhaseBegan, Published, Released, Resumed
from staleflow.fleet import Fleet
from staleflow.members import GroupFilter, Members
from staleflow.parameter_server.base import ParameterServer
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.recorder import Recorder
from staleflow.rollout import Rollout
from staleflow.rollouts import Rollouts
from staleflow.run_folder import RunFolder
from staleflow.statistics import Evaluation, PipelineStatistics, Report
from staleflow.store import TrajectoryStore
from staleflow.tasks import ResumableTaskSource, TaskSource, hand_out_again
from staleflow.trainer.base import Trainer
from staleflow.types import StepMetrics, TaskData, TrainBatch, Trajectory
from staleflow.view import show
from staleflow.watchdog import Watchdog

SAVE_TIMEOUT_S = 120.0
EVALUATION_SHARE = 4

logger = logging.getLogger("staleflow")


class Pipeline(Generic[TaskData]):
    """Asynchronous RL post-training of one model, from tasks to weights.

    Args:
        tasks: what to train on.
        rollout: plays one task with the policy and returns the reward.
        engines: at least one, all of the trainer's model.
        trainer: of the same model.
        config: sizes and limits.
        held_out: tasks to measure by, played once each before the first step and after the last.
        group_filter: takes complete groups out of training, each replaced by a new one; None keeps all.
        coordinator: the policy that routes, admits and syncs.
        parameter_server: where published weights live.
        run_dir: the run folder; default ``runs/<local time>``.
        resume: the folder of a run, which then goes on from its newest checkpoint, or that of one checkpoint, whose run
            then goes on as if nothing had happened since. It goes on in its own folder.
            Batch and group sizes, ``max_staleness``, the ``extra_`` settings, the model and the tasks must be the
            same; everything else may change.
        progress: show a live view, or a line now and then where there is no terminal.
    """

    def __init__(
        self,
        *,
        tasks: TaskSource[TaskData],
        rollout: Rollout[TaskData],
        engines: Sequence[Engine],
        trainer: Trainer,
        config: Config,
        held_out: Sequence[TaskData] = (),
        group_filter: GroupFilter | None = None,
        coordinator: Coordinator | None = None,
        parameter_server: ParameterServer | None = None,
        run_dir: str | Path | None = None,
        resume: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        if not engines:
            raise ConfigError("engines is empty; at least one is needed")
        self.config = config
        self._tasks = tasks
        self._rollout = rollout
        self._trainer = trainer
        self._held_out = held_out
        self._group_filter = group_filter
        self._coordinator = LeastLoad() if coordinator is None else coordinator
        self._parameter_server = parameter_server
        self._resumed = None if resume is None else open_checkpoint(Path(resume))
        self._run_dir = _run_dir(run_dir, self._resumed)
        if self._resumed is not None or config.checkpoint_every_steps is not None:
            self._resumable_tasks()
        self._progress = progress

        self._ledger = _ledger(config, self._resumed)
        self._store: TrajectoryStore[TaskData] = TrajectoryStore()
        self._changed = asyncio.Event()
        self._fleet = Fleet(engines, self._store, lambda: self._ledger.published, self._changed.set)
        self._trainer_ready = False
        self._spawned: set[asyncio.Task[None]] = set()
        self._evaluation: asyncio.Task[None] | None = None
        self._phase = "new"

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self._run_dir

    async def run(self) -> Report:
        """Train; returns when all steps are done or the task source has no more.

        Raises the first error of any part. Cancelled or failed, it saves a checkpoint if a step was trained, ends
        all child processes and then raises.
        """
        if self._phase != "new":
            raise ConfigError("a Pipeline runs once; make another one for another run")
        parameter_server = self._parameter_server or SharedMemoryParameterServer()
        history = None if self._resumed is None else self._resumed.cut.history
        with closing(parameter_server), RunFolder(self._run_dir, history) as folder:
            self._wire(folder, parameter_server)
            if self._resumed is not None:
                self._checkpoints.forget_after(self._resumed.cut.step)
                self._recorder.event(
                    Resumed(self._recorder.t(), self._resumed.cut.step, engines=len(self._fleet.engines))
                )
            self._enter("starting")
            folder.write_json(
                "config.json",
                {
                    "config": self.config,
                    "engines": [engine.settings for engine in self._fleet.engines],
                    "trainer": self._trainer.settings,
                },
            )
            try:
                async with asyncio.TaskGroup() as self._scope:
                    # A task like all others: a group lists its tasks' errors as they came, its body's error last.
                    life = self._scope.create_task(self._live(), name="life of the run")
            except BaseExceptionGroup as errors:
                _raise_first(errors)
            finally:
                trouble = await self._shut_down()
            if trouble is not None:
                raise trouble
        return life.result()

    def _wire(self, folder: RunFolder, weights: ParameterServer) -> None:
        """Make the parts that live in a run folder."""
        self._folder, self._weights = folder, weights
        self._checkpoints = Checkpoints(folder.path, keep=self.config.keep_checkpoints)
        recorded = None if self._resumed is None else self._resumed.cut.recorded
        self._recorder = Recorder(folder, self._ledger, self._fleet.load.idle_s, recorded)
        self._members = Members(
            rollout=self._rollout,
            group_filter=self._group_filter,
            config=self.config,
            ledger=self._ledger,
            store=self._store,
            fleet=self._fleet,
            recorder=self._recorder,
            changed=self._changed,
            spawn=self._spawn,
        )
        self._rollouts = Rollouts(
            tasks=self._tasks,
            coordinator=self._coordinator,
            config=self.config,
            ledger=self._ledger,
            store=self._store,
            fleet=self._fleet,
            weights=weights,
            recorder=self._recorder,
            members=self._members,
            spawn=self._spawn,
        )
        limit_s = self.config.stall_warning_s
        self._watchdog = Watchdog(self._rollouts, limit_s=limit_s, folder=folder, recorder=self._recorder)

    def statistics(self) -> PipelineStatistics:
        """The state of the run now. Raises :class:`ConfigError` before ``run`` has begun."""
        if self._phase == "new":
            raise ConfigError("statistics of a run that has not begun; call run() first")
        return self._recorder.statistics(
            phase=self._phase,
            steps=self.config.steps,
            running=self._fleet.load.running,
            waiting=len(self._store.waiting),
            failed=self._members.failures.total,
        )

    def blockers(self) -> tuple[Blocker, ...]:
        """The groups that the next batch waits for now, each with a sentence for people as its text; empty if it waits
        for none, or only for groups to be admitted. Raises :class:`ConfigError` before ``run`` has begun."""
        if self._phase == "new":
            raise ConfigError("blockers of a run that has not begun; call run() first")
        return self._members.blockers() if self._rollouts.admitting else ()

    # -- the life of a run ---------------------------------------------------------------------------------------

    async def _live(self) -> Report:
        self._spawn(self._recorder.lag.run(), "loop lag")
        self._spawn(self._watchdog.run(), "watchdog")
        if self._progress:
            self._spawn(show(self.statistics), "view")
        async with asyncio.TaskGroup() as starting:
            for index, engine in enumerate(self._fleet.engines):
                starting.create_task(self._start_engine(engine, f"engine-{index}"))
            starting.create_task(self._start_trainer())
        if self._resumed is not None:
            await self._resume(self._resumed)
        self._trainer_ready = True
        self._spawn(self._rollouts.coordinate(), "coordination")
        self._spawn(self._rollouts.feed(), "tasks")

        if self._resumed is None:
            self._enter("evaluating before the first step")
            await self._evaluate(at_once=self._fleet.capacity)
        self._enter("training")
        self._recorder.training_begins()
        self._fleet.load.begin()
        self._rollouts.admitting = True
        self._changed.set()
        ended = await self._train()
        self._rollouts.end(ended)
        self._enter("evaluating after the last step")
        if self._evaluation is not None:
            await self._evaluation
        if self._recorder.evaluated_step != self._ledger.published:
            await self._evaluate(at_once=self._fleet.capacity)
        self._enter("saving")
        await self._trainer.save(self._folder.checkpoint)
        self._enter("done")
        for task in self._spawned:
            task.cancel()
        return self._recorder.report(
            ended=ended, failed_attempts=self._members.failures.by_cause, truncated=self._members.truncated
        )

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._recorder.event(PhaseBegan(self._recorder.t(), phase))

    async def _start_engine(self, engine: Engine, name: str) -> None:
        await engine.start(name, self._folder.logs)
        # Watched from here on, however long the others take to start.
        self._spawn(engine.run(), name)

    async def _start_trainer(self) -> None:
        await self._trainer.start(self._folder.logs)
        self._spawn(self._trainer.run(), "trainer")

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> "asyncio.Task[None]":
        """Start a task of the run's scope; those still there when the run is over are cancelled."""
        task = self._scope.create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    async def _shut_down(self) -> Exception | None:
        """Save what was trained, stop every part; returns what went wrong, for a run in which nothing else did."""
        unsaved = self._phase != "done" and self._ledger.published > 0
        trouble: list[BaseException | None] = []
        try:
            self._rollouts.end("shut_down")
            self._recorder.keep_journal()
        except RunFolderError as error:
            trouble.append(error)
        try:
            if unsaved and self._trainer_ready:
                async with asyncio.timeout(SAVE_TIMEOUT_S):
                    await self._trainer.save(self._folder.checkpoint)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parts still have to be stopped
            logger.warning("no checkpoint could be saved: %s", str(error) or type(error).__name__)
            trouble.append(error)
        finally:
            stops = [*(engine.stop() for engine in self._fleet.engines), self._trainer.stop()]
            trouble += await asyncio.gather(*stops, return_exceptions=True)
        statistics = self._ledger.statistics()
        if not statistics.accounting_holds:
            trouble.append(LedgerError(f"the accounting law does not hold: {statistics}"))
        return next((error for error in trouble if isinstance(error, Exception)), None)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _cut(self) -> Cut:
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
        )

    async def _save(self, cut: Cut) -> None:
        self._recorder.event(CheckpointBegan(self._recorder.t(), cut.step))
        await self._checkpoints.save(cut, self._trainer, self._folder.history, best=self._recorder.best_steps)
        self._recorder.event(CheckpointSaved(self._recorder.t(), cut.step))

    async def _resume(self, checkpoint: Checkpoint) -> None:
        """Make every part what it was at the cut; what only a lost process knew is played again."""
        self._enter("resuming")
        cut = checkpoint.cut
        tasks = await hand_out_again(self._resumable_tasks(), (group.task for group in cut.groups), cursor=cut.cursor)
        await self._trainer.load_state(checkpoint.trainer)
        with self._weights.publishing(cut.step) as weights:
            await self._trainer.publish(weights)
        await self._rollouts.sync_all(cut.step)
        self._rollouts.cursor = cut.cursor
        self._members.truncated = cut.truncated
        self._members.failures.by_cause.update(cut.failed_attempts)
        later_s = self._recorder.started_s - cut.recorded.started_s
        for group in cut.groups:
            self._members.resume(revive_group(group, tasks[group.task], later_s), group.playing)
        self._evaluate_if_due(cut.step)

    def _resumable_tasks(self) -> ResumableTaskSource[TaskData]:
        if not isinstance(self._tasks, ResumableTaskSource):
            raise ConfigError(
                f"tasks is a {type(self._tasks).__name__} without a cursor, so a run on it cannot be resumed: give it "
                "one (staleflow.ResumableTaskSource), or leave checkpoint_every_steps at None"
            )
        return self._tasks

    # -- training ------------------------------------------------------------------------------------------------

    async def _train(self) -> str:
        """Step until the end; returns why it came."""
        while self._ledger.next_batch < self.config.steps:
            waiting_since = clock.now()
            if not await self._batch_ready():
                return "source_exhausted"
            trainer_wait_s = clock.now() - waiting_since
            lease = self._ledger.consume()
            batch = TrainBatch(lease.batch, [self._store.close(group).trajectories() for group in lease.groups])
            self._recorder.event(Consumed(self._recorder.t(), lease.batch, lease.groups))
            self._members.expire(lease.expired)
            self._changed.set()
            try:
                metrics, train_s, publish_s = await self._train_and_publish(batch)
            except BaseException:
                self._ledger.release(batch.step)
                self._recorder.event(Released(self._recorder.t(), batch.step))
                raise
            self._recorder.event(Published(self._recorder.t(), batch.step + 1))
            self._changed.set()
            self._recorder.step(batch, metrics, trainer_wait_s=trainer_wait_s, train_s=train_s, publish_s=publish_s)
            every = self.config.checkpoint_every_steps
            due = every is not None and (self._ledger.published % every == 0 or batch.step + 1 == self.config.steps)
            cut = self._cut() if due else None
            self._evaluate_if_due(batch.step + 1)
            if cut is not None:
                await self._save(cut)
        return "all_steps_done"

    async def _train_and_publish(self, batch: TrainBatch) -> tuple[StepMetrics, float, float]:
        """Train on a leased batch; returns the trainer's metrics and the seconds of training and of publishing."""
        started_s = clock.now()
        metrics = await self._trainer.step(batch)
        trained_s = clock.now()
        version = batch.step + 1
        with self._weights.publishing(version) as weights:
            await self._trainer.publish(weights)
        self._ledger.publish(version)
        return metrics, trained_s - started_s, clock.now() - trained_s

    def _evaluate_if_due(self, version: int) -> None:
        every = self.config.evaluate_every_steps
        due = every is not None and version % every == 0 and version < self.config.steps
        if due and (self._evaluation is None or self._evaluation.done()):
            # A part of the engines' room, so that training goes on beside it.
            at_once = max(1, self._fleet.capacity // EVALUATION_SHARE)
            self._evaluation = self._spawn(self._evaluate(at_once=at_once), "evaluation")

    async def _batch_ready(self) -> bool:
        """Wait for the next batch, with as much patience as the straggler policy has; False when it can never come."""
        policy = self.config.stragglers
        patience_ends_s = None if policy is None else clock.now() + policy.patience_s
        while not self._ledger.is_ready():
            if self._rollouts.over:
                return False
            self._members.batch_may_be_ready.clear()
            try:
                async with asyncio.timeout_at(patience_ends_s):
                    await self._members.batch_may_be_ready.wait()
            except TimeoutError:
                if policy is not None:
                    self._members.hurry(policy, task_at_hand=self._rollouts.task_at_hand)
                    patience_ends_s = clock.now() + policy.patience_s
        return True

    # -- measuring -----------------------------------------------------------------------------------------------

    async def _evaluate(self, *, at_once: int) -> None:
        """Play every held-out task once, on weights no older than those published now.

        Raises :class:`TooManyFailuresError` where training would: an accuracy of failures means nothing.
        """
        if not self._held_out:
            return
        step = self._ledger.published
        trajectories = [Trajectory(index, 0, index, step, clock.now()) for index in range(len(self._held_out))]
        # Those that no engine has room for must not queue for one while their deadline runs.
        room = asyncio.Semaphore(at_once)

        async def play_one(data: TaskData, trajectory: Trajectory) -> None:
            async with room:
                await self._members.play_task(data, trajectory, step)

        plays = [play_one(*pair) for pair in zip(self._held_out, trajectories, strict=True)]
        failed = [error for error in await asyncio.gather(*plays, return_exceptions=True) if error is not None]
        if len(failed) > self.config.max_failure_share * len(plays):
            raise TooManyFailuresError(
                f"{len(failed)} of {len(plays)} held-out rollouts failed (max_failure_share is "
                f"{self.config.max_failure_share:g}); the first: {type(failed[0]).__name__}: {failed[0]}"
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


def _run_dir(given: str | Path | None, resumed: Checkpoint | None) -> Path:
    if resumed is None:
        return Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S-%f}" if given is None else Path(given)
    if given is not None and Path(given).resolve() != resumed.run_dir:
        raise ConfigError(f"run_dir is {str(given)!r}; the run that is resumed goes on in {resumed.run_dir}")
    return resumed.run_dir


def _ledger(config: Config, resumed: Checkpoint | None) -> StalenessLedger:
    if resumed is not None:
        return resumed.ledger(config)
    return StalenessLedger(
        batch_size=config.batch_size,
        max_staleness=config.max_staleness,
        group_size=config.group_size,
        extra_groups=config.extra_groups,
        extra_members=config.extra_members,
    )


def _raise_first(errors: BaseExceptionGroup) -> NoReturn:
    """Raise the error that came first; the others are its consequences."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    raise first from first.__cause__
