"""The pipeline: every part, wired once.

::

    tasks -> trajectory store -> coordinator --commands--> engines -> rewards -> staleness ledger -> trainer
                  ^                  ^                      |  |  ^                                    |
                  +---- partials ----|----------------------+  |  +--- pull --- parameter server <-publish
                                     +------- snapshot --------+

Data flow. The *coordination* task wakes when something has changed, takes a snapshot, lets the coordinator decide
and carries out its commands: admit a group (if the ledger agrees), route a request, sync an engine. One *player*
task per member runs the user's rollout; its ``generate`` calls wait in the store until they are routed. The
*training* loop waits until the ledger has a batch, trains, publishes. All of them live in one ``TaskGroup``: the
first failure ends everything and is what the caller sees.

Invariant: the ledger is told of every change of state at the moment it happens, with nothing awaited in between, so
its law (``docs/design/ledger.md``) holds at every instant of the run.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Generic, NoReturn, assert_never

from staleflow import clock
from staleflow._core import Lease, Refusal, StalenessLedger
from staleflow.config import Config
from staleflow.coordinator import Admit, Command, Coordinator, LeastLoad, Route, Snapshot, Sync
from staleflow.engines.base import Engine
from staleflow.errors import ConfigError, LedgerError, RunFolderError, TooManyFailuresError
from staleflow.events import (
    Aborted,
    Admitted,
    Completed,
    Consumed,
    Event,
    Failed,
    Filtered,
    Finished,
    Published,
    Released,
    Routed,
    Synced,
)
from staleflow.failures import FailureLimit
from staleflow.fleet import Fleet
from staleflow.parameter_server.base import ParameterServer
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.recorder import Recorder
from staleflow.rollout import LLM, Rollout, play
from staleflow.run_folder import RunFolder
from staleflow.statistics import Evaluation, PipelineStatistics, Report
from staleflow.store import Group, TrajectoryStore
from staleflow.tasks import TaskSource
from staleflow.trainer.base import Trainer
from staleflow.types import StepMetrics, Task, TaskData, TrainBatch, Trajectory
from staleflow.view import show

GroupFilter = Callable[[Sequence[Trajectory]], str | None]
"""Why a complete group should not be trained on, or None."""

SAVE_TIMEOUT_S = 120.0
STALL_WARNING_S = 120.0
EVALUATION_SHARE = 4

logger = logging.getLogger("staleflow")


def uniform_rewards(group: Sequence[Trajectory]) -> str | None:
    """A :data:`GroupFilter`: takes out groups whose members all earned the same, which have advantage 0."""
    return "uniform_rewards" if len({trajectory.reward for trajectory in group}) == 1 else None


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
        self._run_dir = Path(run_dir) if run_dir is not None else Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S-%f}"
        self._progress = progress

        self._ledger = StalenessLedger(
            batch_size=config.batch_size, max_staleness=config.max_staleness, group_size=config.group_size
        )
        self._store: TrajectoryStore[TaskData] = TrajectoryStore()
        self._changed = asyncio.Event()
        self._batch_may_be_ready = asyncio.Event()
        self._fleet = Fleet(engines, self._store, lambda: self._ledger.published, self._changed.set)
        self._next_task: Task[TaskData] | None = None
        self._next_task_taken = asyncio.Event()
        self._admitting = False
        self._exhausted = False
        self._trainer_ready = False
        self._lease: Lease | None = None
        self._spawned: set[asyncio.Task[None]] = set()
        self._evaluation: asyncio.Task[None] | None = None

        self._phase = "new"
        self._failures = FailureLimit(config.max_failure_share)

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
        with closing(parameter_server), RunFolder(self._run_dir) as folder:
            self._folder, self._weights = folder, parameter_server
            self._recorder = Recorder(folder, self._fleet.load.idle_s)
            self._phase = "starting"
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

    def statistics(self) -> PipelineStatistics:
        """The state of the run now. Raises :class:`ConfigError` before ``run`` has begun."""
        if self._phase == "new":
            raise ConfigError("statistics of a run that has not begun; call run() first")
        return self._recorder.statistics(
            self._ledger.statistics(),
            phase=self._phase,
            steps=self.config.steps,
            running=self._fleet.load.running,
            waiting=len(self._store.waiting),
            failed=self._failures.total,
        )

    # -- the life of a run ---------------------------------------------------------------------------------------

    async def _live(self) -> Report:
        self._spawn(self._recorder.lag.run(), "loop lag")
        if self._progress:
            self._spawn(show(self.statistics), "view")
        async with asyncio.TaskGroup() as starting:
            for index, engine in enumerate(self._fleet.engines):
                starting.create_task(self._start_engine(engine, f"engine-{index}"))
            starting.create_task(self._start_trainer())
        self._spawn(self._coordinate(), "coordination")
        self._spawn(self._feed(), "tasks")
        self._spawn(self._watch_progress(), "progress")

        self._phase = "evaluating before the first step"
        await self._evaluate(at_once=self._fleet.capacity)
        self._phase = "training"
        self._recorder.training_begins()
        self._fleet.load.begin()
        self._admitting = True
        self._changed.set()
        ended = await self._train()
        self._end_live_groups(ended)
        self._phase = "evaluating after the last step"
        if self._evaluation is not None:
            await self._evaluation
        await self._evaluate(at_once=self._fleet.capacity)
        self._phase = "saving"
        await self._trainer.save(self._folder.checkpoint)
        self._phase = "done"
        for task in self._spawned:
            task.cancel()
        return self._recorder.report(self._ledger.statistics(), ended=ended, failed_attempts=self._failures.by_cause)

    async def _start_engine(self, engine: Engine, name: str) -> None:
        await engine.start(name, self._folder.logs)
        # Watched from here on, however long the others take to start.
        self._spawn(engine.run(), name)

    async def _start_trainer(self) -> None:
        await self._trainer.start(self._folder.logs)
        self._trainer_ready = True
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
            self._end_live_groups("shut_down")
        except RunFolderError as error:
            trouble.append(error)
        try:
            if unsaved and self._trainer_ready:
                async with asyncio.timeout(SAVE_TIMEOUT_S):
                    await self._trainer.save(self._folder.checkpoint)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parts still have to be stopped
            logger.warning("no checkpoint could be saved: %s", error or type(error).__name__)
            trouble.append(error)
        finally:
            stops = [*(engine.stop() for engine in self._fleet.engines), self._trainer.stop()]
            trouble += await asyncio.gather(*stops, return_exceptions=True)
        statistics = self._ledger.statistics()
        if not statistics.accounting_holds:
            trouble.append(LedgerError(f"the accounting law does not hold: {statistics}"))
        return next((error for error in trouble if isinstance(error, Exception)), None)

    def _end_live_groups(self, reason: str) -> None:
        self._admitting = False
        self._ledger.drain()
        leased = set() if self._lease is None else set(self._lease.groups)
        for group in self._store.groups:
            if group.id not in leased:
                self._abort(group, reason)

    # -- training ------------------------------------------------------------------------------------------------

    async def _train(self) -> str:
        """Step until the end; returns why it came."""
        while self._ledger.next_batch < self.config.steps:
            waiting_since = clock.now()
            if not await self._batch_ready():
                return "source_exhausted"
            trainer_wait_s = clock.now() - waiting_since
            self._lease = self._ledger.consume()
            self._record(Consumed(self._t(), self._lease.batch, self._lease.groups))
            self._changed.set()
            batch = TrainBatch(
                self._lease.batch, [self._store.get(group).trajectories() for group in self._lease.groups]
            )
            try:
                metrics, train_s, publish_s = await self._train_and_publish(batch)
            except BaseException:
                self._ledger.release(batch.step)
                self._record(Released(self._t(), batch.step))
                raise
            self._settle(self._lease)
            self._recorder.step(batch, metrics, trainer_wait_s=trainer_wait_s, train_s=train_s, publish_s=publish_s)
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

    def _settle(self, lease: Lease) -> None:
        self._lease = None
        version = lease.batch + 1
        self._record(Published(self._t(), version))
        for group in lease.groups:
            self._store.close(group)
        self._changed.set()
        every = self.config.evaluate_every_steps
        due = every is not None and version % every == 0 and version < self.config.steps
        if due and (self._evaluation is None or self._evaluation.done()):
            # A part of the engines' room, so that training goes on beside it.
            at_once = max(1, self._fleet.capacity // EVALUATION_SHARE)
            self._evaluation = self._spawn(self._evaluate(at_once=at_once), "evaluation")

    async def _batch_ready(self) -> bool:
        """Wait for the next batch; False when it can never come."""
        while not self._ledger.is_ready():
            if self._exhausted and self._store.running_members == 0:
                return False
            self._batch_may_be_ready.clear()
            await self._batch_may_be_ready.wait()
        return True

    # -- coordination --------------------------------------------------------------------------------------------

    async def _watch_progress(self) -> None:
        """Say what everything waits for when no step has come for a while; the run itself goes on."""
        while True:
            published = self._ledger.published
            await asyncio.sleep(STALL_WARNING_S)
            if self._ledger.published == published and self._admitting:
                ledger = self._ledger.statistics()
                logger.warning(
                    "no step for %.0f s: batch %d waits for groups %s; %d requests run and %d wait for an engine; %s; "
                    "groups filtered so far: %s; attempts failed so far: %d",
                    STALL_WARNING_S,
                    ledger.next_batch,
                    self._ledger.blockers() or "not yet admitted",
                    self._fleet.load.running,
                    len(self._store.waiting),
                    "the task source is awaited" if self._next_task is None else "a task is at hand",
                    dict(ledger.filtered) or "none",
                    self._failures.total,
                )

    async def _coordinate(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for command in self._coordinator.decide(self._snapshot()):
                self._carry_out(command)

    async def _feed(self) -> None:
        """Keep the next task at hand, so that a slow source holds up nothing that already runs."""
        while (task := await self._tasks.next()) is not None:
            self._next_task = task
            self._next_task_taken.clear()
            self._changed.set()
            await self._next_task_taken.wait()
        self._exhausted = True
        self._batch_may_be_ready.set()

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            engines=self._fleet.views(),
            waiting=self._store.waiting,
            running_members=self._store.running_members,
            group_size=self.config.group_size,
            wanted_groups=self._wanted_groups(),
            published=self._ledger.published,
        )

    def _wanted_groups(self) -> int:
        if not self._admitting or self._next_task is None:
            return 0
        needed = (self.config.steps - self._ledger.next_batch) * self.config.batch_size
        leased = 0 if self._lease is None else len(self._lease.groups)
        return max(0, needed - (len(self._store) - leased))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Route(request_id, engine):
                if self._fleet.dispatch(request_id, engine):
                    self._record(Routed(self._t(), request_id, engine))
            case Admit(engine):
                self._admit(self._fleet.version(engine))
            case Sync(engine, version):
                self._fleet.begin_sync(engine)
                self._spawn(self._sync(engine, version), f"sync {engine}")
            case _:
                assert_never(command)

    def _admit(self, version: int) -> None:
        if self._next_task is None:
            return
        admitted = self._ledger.admit(version)
        if isinstance(admitted, Refusal):
            return
        group = Group(admitted, self._next_task, version, self.config.group_size, clock.now())
        self._next_task = None
        self._next_task_taken.set()
        self._store.open(group)
        self._record(Admitted(self._t(), group.id, group.task.id, version))
        for member in range(self.config.group_size):
            if member > 0:
                self._start_attempt(group, member)
            self._play(group, member)

    async def _sync(self, engine: int, version: int) -> None:
        await self._fleet.sync(engine, version, self._weights)
        self._record(Synced(self._t(), engine, version))

    # -- members -------------------------------------------------------------------------------------------------

    def _start_attempt(self, group: Group[TaskData], member: int) -> None:
        refusal = self._ledger.start_member(group.id, member, group.version)
        if refusal is not None:
            raise LedgerError(f"member {member} of group {group.id} refused at the group's own version: {refusal}")

    def _play(self, group: Group[TaskData], member: int) -> None:
        play_member = self._play_member(group, member, group.attempts[member])
        group.players[member] = self._spawn(play_member, f"group {group.id} member {member}")

    async def _play_member(self, group: Group[TaskData], member: int, attempt: int) -> None:
        trajectory = Trajectory(group.task.id, group.id, member, attempt, group.admitted_s)
        try:
            await self._play_task(group.task.data, trajectory, group.version)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises fails its trajectory alone
            self._member_failed(group, trajectory, error)
        else:
            self._member_finished(group, trajectory)

    async def _play_task(self, data: TaskData, trajectory: Trajectory, min_version: int) -> None:
        generate = partial(self._fleet.generate, min_version=min_version)
        llm = LLM(trajectory, generate, self._fleet.tokenizer, self._fleet.max_model_tokens)
        await play(self._rollout, data, llm, trajectory, self.config.rollout_timeout_s)

    def _member_finished(self, group: Group[TaskData], trajectory: Trajectory) -> None:
        self._failures.succeeded()
        versions = trajectory.versions
        oldest, newest = min(versions), max(versions)
        self._store.finish(trajectory)
        complete = self._ledger.finish_member(
            group.id, trajectory.member, min_version=oldest, attempt=trajectory.attempt
        )
        self._record(
            Finished(
                self._t(),
                group.id,
                trajectory.member,
                trajectory.attempt,
                trajectory.reward or 0.0,
                len(versions),
                (oldest, newest),
            )
        )
        if complete:
            self._group_complete(group)
        self._changed.set()
        self._batch_may_be_ready.set()

    def _group_complete(self, group: Group[TaskData]) -> None:
        self._record(Completed(self._t(), group.id))
        reason = None if self._group_filter is None else self._group_filter(group.trajectories())
        if reason is not None:
            self._ledger.filter(group.id, reason)
            self._store.close(group.id)
            self._record(Filtered(self._t(), group.id, reason))

    def _member_failed(self, group: Group[TaskData], trajectory: Trajectory, error: Exception) -> None:
        member, cause = trajectory.member, type(error).__name__
        self._record(Failed(self._t(), group.id, member, trajectory.attempt, cause))
        self._failures.failed(error, f"task {trajectory.task}, group {group.id}, member {member}")
        if trajectory.attempt + 1 < self.config.max_attempts:
            group.attempts[member] += 1
            self._start_attempt(group, member)
            self._play(group, member)
        else:
            del group.players[member]
            self._abort(group, "failed")
        self._changed.set()
        self._batch_may_be_ready.set()

    def _abort(self, group: Group[TaskData], reason: str) -> None:
        group.cancel()
        self._ledger.abort(group.id, reason)
        self._store.close(group.id)
        self._record(Aborted(self._t(), group.id, reason))

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
                await self._play_task(data, trajectory, step)

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

    def _t(self) -> float:
        return self._recorder.t()

    def _record(self, event: Event) -> None:
        self._recorder.event(event)


def _raise_first(errors: BaseExceptionGroup) -> NoReturn:
    """Raise the error that came first; the others are its consequences."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    raise first from first.__cause__
