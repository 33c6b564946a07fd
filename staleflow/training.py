"""Everything right of the ledger: wait for a batch, train it, publish, and now and then save a checkpoint.

Data flow. A lease on a batch of whole groups comes from the ledger and goes to the trainer; new weights go to the
parameter server, and only then is the version published and the lease final. Whatever ends a step before that gives
the lease back. How groups become complete is the business of :mod:`staleflow.members`.

Invariant: the ledger is told of every change in the same instant, with nothing awaited in between.
"""

import asyncio
import logging
from typing import Generic

from staleflow import clock
from staleflow._core import StalenessLedger
from staleflow.checkpointing import Checkpointing
from staleflow.config import Config
from staleflow.errors import StaleflowError
from staleflow.evaluation import HeldOut
from staleflow.events import Consumed, Published, Released
from staleflow.members import Members
from staleflow.parameter_server.base import ParameterServer
from staleflow.recorder import Recorder
from staleflow.rollouts import Rollouts
from staleflow.store import TrajectoryStore
from staleflow.trainer.base import Trainer
from staleflow.types import StepMetrics, TaskData, TrainBatch

SAVE_TIMEOUT_S = 120.0
"""What saving may take when the run is ended from outside; a step under way is part of it."""

logger = logging.getLogger("staleflow")


class Training(Generic[TaskData]):
    """The training loop of one run."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        config: Config,
        ledger: StalenessLedger,
        store: TrajectoryStore[TaskData],
        weights: ParameterServer,
        recorder: Recorder,
        members: Members[TaskData],
        rollouts: Rollouts[TaskData],
        held_out: HeldOut[TaskData],
        checkpointing: Checkpointing[TaskData],
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._ledger = ledger
        self._store = store
        self._weights = weights
        self._recorder = recorder
        self._members = members
        self._rollouts = rollouts
        self._held_out = held_out
        self._checkpointing = checkpointing
        self._between_steps = asyncio.Event()
        self._between_steps.set()
        self._interrupted = False

    async def train(self) -> str:
        """Step until the end; returns why it came."""
        while self._ledger.next_batch < self._config.steps:
            waiting_since = clock.now()
            if not await self._batch_ready():
                return "source_exhausted"
            await self._step(trainer_wait_s=clock.now() - waiting_since)
        return "all_steps_done"

    async def interrupt(self) -> None:
        """Begin no further step, and save a checkpoint to resume from if the run saves any, in bounded time.

        A step that is under way comes to its end first; without one the checkpoint is of this very moment. There is
        none before the first step.
        """
        if self._config.checkpoint_every_steps is None:
            return
        logger.warning(
            "interrupted: a step that is under way is finished and a checkpoint saved, within %g s; interrupt again to "
            "do without",
            SAVE_TIMEOUT_S,
        )
        self._interrupted = True
        try:
            async with asyncio.timeout(SAVE_TIMEOUT_S):
                in_step = not self._between_steps.is_set()
                await self._between_steps.wait()
                just_saved = in_step and self._checkpoint_due()
                if self._ledger.published > 0 and not just_saved:
                    await self._checkpointing.save(self._checkpointing.cut())
        except (StaleflowError, TimeoutError) as error:
            logger.warning("no checkpoint of this moment could be saved: %s", str(error) or type(error).__name__)

    async def _step(self, *, trainer_wait_s: float) -> None:
        """Consume the batch that is ready, and do all that is due after it."""
        self._between_steps.clear()
        lease = self._ledger.consume()
        batch = TrainBatch(lease.batch, [self._store.close(group).trajectories() for group in lease.groups])
        self._recorder.event(Consumed(self._recorder.t(), lease.batch, lease.groups))
        self._members.expire(lease.expired)
        self._members.changed.set()
        try:
            metrics, train_s, publish_s = await self._train_and_publish(batch)
        except BaseException:
            self._ledger.release(batch.step)
            self._recorder.event(Released(self._recorder.t(), batch.step))
            raise
        self._recorder.event(Published(self._recorder.t(), batch.step + 1))
        self._members.changed.set()
        self._recorder.step(batch, metrics, trainer_wait_s=trainer_wait_s, train_s=train_s, publish_s=publish_s)
        cut = self._checkpointing.cut() if self._checkpoint_due() else None
        self._held_out.begin_if_due(batch.step + 1)
        if cut is not None:
            await self._checkpointing.save(cut)
        self._between_steps.set()

    def _checkpoint_due(self) -> bool:
        every, published = self._config.checkpoint_every_steps, self._ledger.published
        return every is not None and (published % every == 0 or published == self._config.steps)

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

    async def _batch_ready(self) -> bool:
        """Wait for the next batch, with as much patience as the straggler policy has; False when it can never come."""
        policy = self._config.stragglers
        patience_ends_s = None if policy is None else clock.now() + policy.patience_s
        while self._interrupted or not self._ledger.is_ready():
            if self._rollouts.over and not self._interrupted:
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
