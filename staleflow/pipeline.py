"""The pipeline: every part, wired once.

::

    tasks -> trajectory store -> coordinator --commands--> engines -> rewards -> staleness ledger -> trainer
                  ^                  ^                      |  |  ^                                    |
                  +---- partials ----|----------------------+  |  +--- pull --- parameter server <-publish
                                     +------- snapshot --------+

Data flow. Left of the ledger, :mod:`staleflow.rollouts` turns tasks into groups and :mod:`staleflow.members` plays them
until they are complete. Right of it, :mod:`staleflow.training` takes batches to the trainer and its weights to the
parameter server. All of it lives in one ``TaskGroup``: the first failure ends everything and is what the caller sees.

Invariant: the ledger is told of every change of state at the moment it happens, with nothing awaited in between, so
its law (``docs/design/ledger.md``) holds at every instant of the run.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, NoReturn

from staleflow._core import StalenessLedger
from staleflow.blockers import Blocker
from staleflow.checkpointing import Checkpointing, resumable
from staleflow.checkpoints import Checkpoint, Checkpoints, open_checkpoint
from staleflow.config import Config
from staleflow.coordinator import Coordinator, LeastLoad
from staleflow.engines.base import Engine
from staleflow.errors import ConfigError, LedgerError, RunFolderError
from staleflow.evaluation import HeldOut
from staleflow.events import PhaseBegan, Resumed
from staleflow.fleet import Fleet
from staleflow.members import GroupFilter, Members
from staleflow.one_model import refuse_different_models
from staleflow.parameter_server.base import ParameterServer
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.recorder import Recorder
from staleflow.rollout import Rollout
from staleflow.rollouts import Rollouts
from staleflow.run_folder import RunFolder
from staleflow.statistics import PipelineStatistics, Report
from staleflow.store import TrajectoryStore
from staleflow.supervision import Supervision
from staleflow.tasks import TaskSource
from staleflow.trainer.base import Trainer
from staleflow.training import SAVE_TIMEOUT_S, Training
from staleflow.types import TaskData
from staleflow.view import show
from staleflow.watchdog import Watchdog
from staleflow.weight_sync import WeightSync

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
        self._held_out_tasks = held_out
        self._group_filter = group_filter
        self._coordinator = LeastLoad() if coordinator is None else coordinator
        self._parameter_server = parameter_server
        self._resumed = None if resume is None else open_checkpoint(Path(resume))
        self._run_dir = _run_dir(run_dir, self._resumed)
        if self._resumed is not None or config.checkpoint_every_steps is not None:
            resumable(tasks)
        self._progress = progress

        self._ledger = _ledger(config, self._resumed)
        self._store: TrajectoryStore[TaskData] = TrajectoryStore()
        self._changed = asyncio.Event()
        self._fleet = Fleet(engines, self._store, lambda: self._ledger.published, self._changed.set)
        self._trainer_ready = False
        self._spawned: set[asyncio.Task[None]] = set()
        self._failed = False
        self._in_a_hurry = False
        self._phase = "new"

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self._run_dir

    async def run(self) -> Report:
        """Train; returns when all steps are done or the task source has no more.

        Raises the first error of any part. Cancelled or failed, it saves the model if a step was trained, ends all
        child processes and then raises. Cancelled with ``checkpoint_every_steps`` it first lets a step that is under
        way come to its end, and saves a checkpoint to resume from; cancelled again, it saves nothing.
        """
        if self._phase != "new":
            raise ConfigError("a Pipeline runs once; make another one for another run")
        parameter_server = self._parameter_server or SharedMemoryParameterServer()
        history = None if self._resumed is None else self._resumed.cut.history
        with closing(parameter_server), RunFolder(self._run_dir, history) as folder:
            self._wire(folder, parameter_server)
            if self._resumed is not None:
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
                    life.add_done_callback(self._ended)
                    try:
                        await asyncio.wait({life})
                    except asyncio.CancelledError:
                        # Before the rollouts are cancelled, which is what comes next. A run in which something has
                        # failed is not saved: its newest checkpoint is from before the failure.
                        if self._phase == "training" and not self._failed:
                            self._in_a_hurry = True
                            await self._training.interrupt()
                            self._in_a_hurry = False
                        raise
            except BaseExceptionGroup as errors:
                _raise_first(errors)
            finally:
                trouble = await self._shut_down()
            if trouble is not None:
                raise trouble
        return life.result()

    def _wire(self, folder: RunFolder, weights: ParameterServer) -> None:
        """Make the parts that live in a run folder."""
        self._folder = folder
        checkpoints = Checkpoints(folder.path, keep=self.config.keep_checkpoints)
        if self._resumed is not None:
            checkpoints.forget_after(self._resumed.cut.step)
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
        self._supervision = Supervision(
            fleet=self._fleet,
            config=self.config,
            log_folder=folder.logs,
            recorder=self._recorder,
            spawn=self._spawn,
        )
        self._rollouts = Rollouts(
            tasks=self._tasks,
            coordinator=self._coordinator,
            config=self.config,
            ledger=self._ledger,
            store=self._store,
            fleet=self._fleet,
            weight_sync=WeightSync(self._fleet, weights, self.config.drain_timeout_s),
            recorder=self._recorder,
            members=self._members,
            spawn=self._spawn,
        )
        self._held_out = HeldOut(
            tasks=self._held_out_tasks,
            config=self.config,
            ledger=self._ledger,
            fleet=self._fleet,
            weights=weights,
            members=self._members,
            recorder=self._recorder,
            spawn=self._spawn,
        )
        self._checkpointing = Checkpointing(
            checkpoints=checkpoints,
            tasks=self._tasks,
            trainer=self._trainer,
            ledger=self._ledger,
            store=self._store,
            fleet=self._fleet,
            weights=weights,
            recorder=self._recorder,
            members=self._members,
            rollouts=self._rollouts,
            folder=folder,
        )
        self._training = Training(
            trainer=self._trainer,
            config=self.config,
            ledger=self._ledger,
            store=self._store,
            weights=weights,
            recorder=self._recorder,
            members=self._members,
            rollouts=self._rollouts,
            held_out=self._held_out,
            checkpointing=self._checkpointing,
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
            fleet=self._fleet.statistics(),
            evaluation=self._held_out.progress,
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
            starting.create_task(self._supervision.start())
            starting.create_task(self._start_trainer())
        refuse_different_models(self._fleet.engines, self._trainer.limits)
        if self._resumed is not None:
            self._enter("resuming")
            await self._checkpointing.resume(self._resumed)
            if self._recorder.evaluated_step != self._ledger.published:
                self._held_out.begin_if_due(self._ledger.published)
        self._trainer_ready = True
        self._spawn(self._supervision.watch(), "supervision")
        self._spawn(self._rollouts.coordinate(), "coordination")
        self._spawn(self._rollouts.feed(), "tasks")

        if self._resumed is None:
            self._enter("evaluating before the first step")
            await self._held_out.alone()
        self._enter("training")
        self._recorder.training_begins()
        self._fleet.load.begin()
        self._rollouts.admitting = True
        self._changed.set()
        ended = await self._training.train()
        self._rollouts.end(ended)
        self._enter("evaluating after the last step")
        await self._held_out.finish()
        self._enter("saving")
        await self._trainer.save(self._folder.checkpoint)
        self._enter("done")
        for task in self._spawned:
            task.cancel()
        return self._recorder.report(
            ended=ended,
            failed_attempts=self._members.failures.by_cause,
            truncated=self._members.truncated,
            fleet=self._fleet.statistics(),
        )

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._recorder.event(PhaseBegan(self._recorder.t(), phase))

    async def _start_trainer(self) -> None:
        await self._trainer.start(self._folder.logs)
        self._spawn(self._trainer.run(), "trainer")

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> "asyncio.Task[None]":
        """Start a task of the run's scope; those still there when the run is over are cancelled."""
        task = self._scope.create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._spawned.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = True

    async def _shut_down(self) -> Exception | None:
        """Save what was trained, stop every part; returns what went wrong, for a run in which nothing else did."""
        unsaved = self._phase != "done" and self._ledger.published > 0 and (self._failed or not self._in_a_hurry)
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
