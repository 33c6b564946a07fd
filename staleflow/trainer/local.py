"""The local trainer, controller side: one child process on this machine that runs torch.

Calls are strictly one after the other, so the wire needs no table of futures: a call sends one message and reads
until the answer with its number. An answer to a call that was cancelled is thereby skipped.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args

import msgspec

from staleflow.errors import ConfigError, TrainerError
from staleflow.process import Child
from staleflow.trainer.faults import NonfinitePolicy
from staleflow.trainer.loss_settings import AdvantageKind, AggregationKind, LossSettings, Parameter, loss_settings
from staleflow.types import ModelLimits, StepMetrics, TrainBatch

START_TIMEOUT_S = 300.0


class TrainerSettings(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First message to the child; see :class:`LocalTrainer` for what the settings mean.

    ``dump_folder`` is where trajectories of updates that are not finite are written to; None before the start.
    """

    model: str
    loss: LossSettings
    advantages: AdvantageKind
    aggregation: AggregationKind
    longest_tokens: int | None
    learning_rate: float
    warmup_steps: int
    decay_steps: int | None
    beta1: float
    beta2: float
    weight_decay: float
    max_gradient_norm: float
    minibatches: int
    micro_batch_tokens: int
    temperature: float
    threads: int
    on_nonfinite: NonfinitePolicy
    dump_folder: str | None = None


class Step(msgspec.Struct, tag=True, frozen=True):
    """Train on a batch."""

    call: int
    batch: TrainBatch


class Publish(msgspec.Struct, tag=True, frozen=True):
    """Write the weights into a folder."""

    call: int
    weights: str


class Save(msgspec.Struct, tag=True, frozen=True):
    """Write a checkpoint folder."""

    call: int
    folder: str


class SaveState(msgspec.Struct, tag=True, frozen=True):
    """Write all that training goes on from to a new folder."""

    call: int
    folder: str


class LoadState(msgspec.Struct, tag=True, frozen=True):
    """Go on from what was written."""

    call: int
    folder: str


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The call has been carried out; ``error`` says why it could not be. ``limits`` are those of the loaded model."""

    call: int
    limits: ModelLimits | None = None
    metrics: StepMetrics | None = None
    error: str | None = None


ToChild: TypeAlias = TrainerSettings | Step | Publish | Save | SaveState | LoadState


def _refuse_impossible(settings: TrainerSettings, step_timeout_s: float) -> None:
    for name, chosen, allowed in (
        ("advantages", settings.advantages, get_args(AdvantageKind)),
        ("aggregation", settings.aggregation, get_args(AggregationKind)),
        ("on_nonfinite", settings.on_nonfinite, get_args(NonfinitePolicy)),
    ):
        if chosen not in allowed:
            raise ConfigError(f"{name} is {chosen!r}; it must be one of {', '.join(allowed)}")
    if (settings.longest_tokens is None) == (settings.aggregation == "sequence_sum"):
        raise ConfigError(
            f"longest_tokens is {settings.longest_tokens} with {settings.aggregation}; it goes with sequence_sum only"
        )
    positive: dict[str, float] = {
        "longest_tokens": 1 if settings.longest_tokens is None else settings.longest_tokens,
        "learning_rate": settings.learning_rate,
        "max_gradient_norm": settings.max_gradient_norm,
        "minibatches": settings.minibatches,
        "micro_batch_tokens": settings.micro_batch_tokens,
        "temperature": settings.temperature,
        "threads": settings.threads,
        "step_timeout_s": step_timeout_s,
        "decay_steps": 1 if settings.decay_steps is None else settings.decay_steps,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value}; it must be above 0")
    for name, value in (("weight_decay", settings.weight_decay), ("warmup_steps", settings.warmup_steps)):
        if not value >= 0:
            raise ConfigError(f"{name} is {value}; it must not be negative")
    for name, beta in (("betas[0]", settings.beta1), ("betas[1]", settings.beta2)):
        if not 0 <= beta < 1:
            raise ConfigError(f"{name} is {beta}; it must be at least 0 and below 1")


class LocalTrainer:
    """GRPO with AdamW in a child process.

    Args:
        model: Hugging Face causal LM folder; the same one the engines load.
        loss: name of a loss for stale data (``docs/design/losses.md``), or your own: a function at the top level of a
            module, or ``"module:function"``, with the signature that ``staleflow/trainer/losses.py`` describes.
        loss_parameters: the loss's parameters, such as clip bounds, where they are not to be the default.
        advantages: what a reward is measured by: ``"group_normalized"``, the mean of its group and in units of its
            standard deviation, so that hard and easy tasks pull alike; ``"group"``, the mean only, which does not
            favour groups that hardly differ; ``"leave_one_out"``, the mean of the other members, which is unbiased;
            ``"batch_normalized"``, mean and deviation of the whole batch, for groups of one; ``"constant"``, nothing:
            every advantage is 1, to imitate what was sampled.
        aggregation: ``"token_mean"`` counts every token alike; ``"sequence_mean"`` every trajectory, so that tokens
            of long ones count less; ``"sequence_sum"`` sums each trajectory's tokens and divides by
            ``longest_tokens``, so that a token's weight does not depend on any length.
        longest_tokens: the most sampled tokens a trajectory can have; for ``"sequence_sum"`` only.
        learning_rate: of AdamW.
        warmup_steps: steps over which the learning rate rises linearly, while AdamW has seen few gradients.
        decay_steps: steps over which the learning rate falls linearly to a tenth, and then stays; None keeps it.
        betas: of AdamW.
        weight_decay: of AdamW.
        max_gradient_norm: gradients are scaled down to this global norm.
        minibatches: optimizer updates per step, but no more than there are groups; each takes an equal share of them.
        micro_batch_tokens: padded tokens per forward pass; bounds memory, does not change the result.
        temperature: the sampler's; a mismatch with the engines' is found at the first step, and warned of.
        threads: torch threads of the child.
        on_nonfinite: what becomes of an update whose loss, gradient or recorded logprobs are not finite. It is never
            made; the trajectories to blame are written to ``logs/nonfinite-*.json`` in the run folder. ``"stop"`` ends
            the run; ``"skip"`` goes on with the next update, counts it in the metrics as one of ``skipped_updates``,
            and ends the run after five in a row.
        step_timeout_s: a step that takes longer ends the run.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        loss: str | Callable[..., Any] = "decoupled_ppo",
        loss_parameters: Mapping[str, Parameter] | None = None,
        advantages: AdvantageKind = "group_normalized",
        aggregation: AggregationKind = "token_mean",
        longest_tokens: int | None = None,
        learning_rate: float = 1e-5,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_gradient_norm: float = 1.0,
        minibatches: int = 1,
        micro_batch_tokens: int = 16_384,
        temperature: float = 1.0,
        threads: int = 1,
        on_nonfinite: NonfinitePolicy = "stop",
        step_timeout_s: float = 1800.0,
    ) -> None:
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"model {str(model)!r}: no such Hugging Face folder (it has no config.json)")
        self.settings = TrainerSettings(
            model=str(model),
            loss=loss_settings(loss, loss_parameters or {}),
            advantages=advantages,
            aggregation=aggregation,
            longest_tokens=longest_tokens,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            decay_steps=decay_steps,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            max_gradient_norm=max_gradient_norm,
            minibatches=minibatches,
            micro_batch_tokens=micro_batch_tokens,
            temperature=temperature,
            threads=threads,
            on_nonfinite=on_nonfinite,
        )
        _refuse_impossible(self.settings, step_timeout_s)
        self._step_timeout_s = step_timeout_s
        self._limits = ModelLimits()
        self._child: Child[Answer] | None = None
        self._calls = itertools.count(1)

    @property
    def limits(self) -> ModelLimits:
        """What the model can be given; known after ``start``."""
        return self._limits

    async def start(self, log_folder: Path) -> None:
        """Spawn the child and wait until the model is loaded; raises :class:`TrainerError` with its last log lines."""
        self._child = await Child.spawn(
            "trainer",
            "staleflow.trainer.local_server",
            log_path=log_folder / "trainer.log",
            receives=Answer,
            error=TrainerError,
        )
        await self._child.send(msgspec.structs.replace(self.settings, dump_folder=str(log_folder)))
        loaded = await self._answer(0, f"load {self.settings.model}", START_TIMEOUT_S)
        self._limits = loaded.limits or ModelLimits()

    async def run(self) -> None:
        """Watch until cancelled; raises :class:`TrainerError` when the child dies."""
        raise await self._running().died()

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Train on one batch; raises :class:`TrainerError` when it is unfit, or not finite (``on_nonfinite``)."""
        call = next(self._calls)
        await self._running().send(Step(call, batch))
        metrics = (await self._answer(call, f"train batch {batch.step}", self._step_timeout_s)).metrics
        if metrics is None:
            raise TrainerError("the trainer answered a step without metrics")
        return metrics

    async def publish(self, weights: Path) -> None:
        """Write the present weights to ``weights``; raises :class:`TrainerError` when that fails."""
        call = next(self._calls)
        await self._running().send(Publish(call, str(weights)))
        await self._answer(call, f"write {weights}", self._step_timeout_s)

    async def save(self, folder: Path) -> None:
        """Write a checkpoint to ``folder``; raises :class:`TrainerError` when that fails."""
        call = next(self._calls)
        await self._running().send(Save(call, str(folder)))
        await self._answer(call, f"write {folder}", self._step_timeout_s)

    async def save_state(self, folder: Path) -> None:
        """Write weights and optimizer to ``folder``; raises :class:`TrainerError` when that fails."""
        call = next(self._calls)
        await self._running().send(SaveState(call, str(folder)))
        await self._answer(call, f"write {folder}", self._step_timeout_s)

    async def load_state(self, folder: Path) -> None:
        """Take weights and optimizer from ``folder``; raises :class:`TrainerError` when they are of another model."""
        call = next(self._calls)
        await self._running().send(LoadState(call, str(folder)))
        await self._answer(call, f"read {folder}", self._step_timeout_s)

    async def stop(self) -> None:
        """End the child. Idempotent."""
        if self._child is not None:
            await self._child.stop()

    async def _answer(self, call: int, work: str, timeout_s: float) -> Answer:
        child = self._running()
        try:
            async with asyncio.timeout(timeout_s):
                while (answer := await child.receive()).call != call:
                    continue
        except TimeoutError:
            raise TrainerError(f"the trainer did not {work} within {timeout_s:.0f} s") from None
        if answer.error is not None:
            raise TrainerError(f"the trainer could not {work}: {answer.error}")
        return answer

    def _running(self) -> Child[Answer]:
        if self._child is None:
            raise TrainerError("the trainer was not started")
        return self._child
