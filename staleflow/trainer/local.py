"""The local trainer, controller side: one or more child processes on this machine that run torch.

Its settings are those of every trainer; :mod:`staleflow.trainer.remote` has another way to come by ranks.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from staleflow.errors import ConfigError, TrainerError
from staleflow.process import Child
from staleflow.trainer.faults import NonfinitePolicy
from staleflow.trainer.loss_settings import AdvantageKind, AggregationKind, LossSettings, Parameter, loss_settings
from staleflow.trainer.protocol import Answer, Call, FromRank, LoadState, Publish, Save, SaveState, Step
from staleflow.trainer.ranks import Rank, Ranks
from staleflow.types import ModelLimits, StepMetrics, TrainBatch

START_TIMEOUT_S = 300.0
ComputeType: TypeAlias = Literal["float32", "bfloat16"]


class TrainerSettings(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First message to a rank; see :class:`LocalTrainer` for what the settings mean.

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
    packing: bool
    temperature: float
    reference: str | None
    kl_weight: float
    dtype: ComputeType
    activation_checkpointing: bool
    ranks: int
    sharded: bool
    threads: int
    on_nonfinite: NonfinitePolicy
    collective_timeout_s: float
    dump_folder: str | None = None


def _refuse_impossible(settings: TrainerSettings, step_timeout_s: float) -> None:
    for name, chosen, allowed in (
        ("advantages", settings.advantages, get_args(AdvantageKind)),
        ("aggregation", settings.aggregation, get_args(AggregationKind)),
        ("on_nonfinite", settings.on_nonfinite, get_args(NonfinitePolicy)),
        ("dtype", settings.dtype, get_args(ComputeType)),
    ):
        if chosen not in allowed:
            raise ConfigError(f"{name} is {chosen!r}; it must be one of {', '.join(allowed)}")
    if (settings.longest_tokens is None) == (settings.aggregation == "sequence_sum"):
        raise ConfigError(
            f"longest_tokens is {settings.longest_tokens} with {settings.aggregation}; it goes with sequence_sum only"
        )
    if (settings.reference is None) != (settings.kl_weight == 0):
        raise ConfigError(
            f"kl_weight is {settings.kl_weight} with reference {settings.reference!r}; give both, or none"
        )
    positive: dict[str, float] = {
        "longest_tokens": 1 if settings.longest_tokens is None else settings.longest_tokens,
        "learning_rate": settings.learning_rate,
        "max_gradient_norm": settings.max_gradient_norm,
        "minibatches": settings.minibatches,
        "micro_batch_tokens": settings.micro_batch_tokens,
        "temperature": settings.temperature,
        "ranks": settings.ranks,
        "threads": settings.threads,
        "step_timeout_s": step_timeout_s,
        "decay_steps": 1 if settings.decay_steps is None else settings.decay_steps,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value}; it must be above 0")
    for name, value in (
        ("weight_decay", settings.weight_decay),
        ("warmup_steps", settings.warmup_steps),
        ("kl_weight", settings.kl_weight),
    ):
        if not value >= 0:
            raise ConfigError(f"{name} is {value}; it must not be negative")
    for name, beta in (("betas[0]", settings.beta1), ("betas[1]", settings.beta2)):
        if not 0 <= beta < 1:
            raise ConfigError(f"{name} is {beta}; it must be at least 0 and below 1")


class LocalTrainer:
    """GRPO with AdamW in child processes, one per rank (``docs/design/trainer.md``).

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
        micro_batch_tokens: tokens per forward pass and rank, padding included, unless one sequence has more; bounds
            memory, does not change the result.
        packing: put the sequences of a micro-batch end to end in one row, instead of side by side with padding. Saves
            time where flash attention is installed. Refused for models that cannot tell the sequences apart.
        temperature: the sampler's; a mismatch with the engines' is found at the first step, and warned of.
        reference: folder of a model of the same vocabulary from which the policy should not diverge; with
            ``kl_weight``, and as large in memory as the model's weights.
        kl_weight: of that divergence (the k3 estimate on sampled tokens) in the loss of each token.
        dtype: of matrix products and activations; weights, gradients and the optimizer are float32.
        activation_checkpointing: keep only the inputs of each layer, and compute it again in the backward pass: less
            memory, a third more time.
        ranks: processes that train together, each on a GPU of its own where there are GPUs.
        sharded: with several ranks, each keeps only its part of weights and optimizer (FSDP2); where torch cannot do
            that, and with False, each keeps all of them. Does not change the result.
        threads: torch threads of each child.
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
        packing: bool = False,
        temperature: float = 1.0,
        reference: str | Path | None = None,
        kl_weight: float = 0.0,
        dtype: ComputeType = "float32",
        activation_checkpointing: bool = False,
        ranks: int = 1,
        sharded: bool = True,
        threads: int = 1,
        on_nonfinite: NonfinitePolicy = "stop",
        step_timeout_s: float = 1800.0,
    ) -> None:
        for name, folder in (("model", model), ("reference", model if reference is None else reference)):
            if not (Path(folder) / "config.json").is_file():
                raise ConfigError(f"{name} {str(folder)!r}: no such Hugging Face folder (it has no config.json)")
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
            packing=packing,
            temperature=temperature,
            reference=None if reference is None else str(reference),
            kl_weight=kl_weight,
            dtype=dtype,
            activation_checkpointing=activation_checkpointing,
            ranks=ranks,
            sharded=sharded,
            threads=threads,
            on_nonfinite=on_nonfinite,
            collective_timeout_s=max(step_timeout_s, START_TIMEOUT_S),
        )
        _refuse_impossible(self.settings, step_timeout_s)
        self._step_timeout_s = step_timeout_s
        self._limits = ModelLimits()
        self._ranks: Ranks | None = None
        self._calls = itertools.count(1)

    @property
    def limits(self) -> ModelLimits:
        """What the model can be given; known after ``start``."""
        return self._limits

    async def start(self, log_folder: Path) -> None:
        """Start the ranks and wait until they have loaded the model; raises :class:`TrainerError` if one cannot."""
        self._ranks = Ranks(await self._come_by_ranks(log_folder))
        settings = msgspec.structs.replace(self.settings, dump_folder=str(log_folder))
        loaded = await self._ranks.call(settings, 0, f"load {self.settings.model}", START_TIMEOUT_S)
        self._limits = loaded.limits or ModelLimits()

    async def run(self) -> None:
        """Watch until cancelled; raises :class:`TrainerError` when a rank dies."""
        raise await self._running().died()

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Train on one batch; raises :class:`TrainerError` when it is unfit, or not finite (``on_nonfinite``)."""
        call = next(self._calls)
        metrics = (await self._call(Step(call, batch), f"train batch {batch.step}")).metrics
        if metrics is None:
            raise TrainerError("the trainer answered a step without metrics")
        return metrics

    async def publish(self, weights: Path) -> None:
        """Write the present weights to ``weights``; raises :class:`TrainerError` when that fails."""
        await self._call(Publish(next(self._calls), str(weights)), f"write {weights}")

    async def save(self, folder: Path) -> None:
        """Write a checkpoint to ``folder``; raises :class:`TrainerError` when that fails."""
        await self._call(Save(next(self._calls), str(folder)), f"write {folder}")

    async def save_state(self, folder: Path) -> None:
        """Write weights and optimizer to ``folder``; raises :class:`TrainerError` when that fails."""
        await self._call(SaveState(next(self._calls), str(folder)), f"write {folder}")

    async def load_state(self, folder: Path) -> None:
        """Take weights and optimizer from ``folder``; raises :class:`TrainerError` when they are of another model."""
        await self._call(LoadState(next(self._calls), str(folder)), f"read {folder}")

    async def stop(self) -> None:
        """End all ranks. Idempotent."""
        if self._ranks is not None:
            await self._ranks.stop()

    async def _call(self, message: Call, work: str) -> Answer:
        return await self._running().call(message, message.call, work, self._step_timeout_s)

    def _running(self) -> Ranks:
        if self._ranks is None:
            raise TrainerError("the trainer was not started")
        return self._ranks

    async def _come_by_ranks(self, log_folder: Path) -> Sequence[Rank]:
        """Start a child per rank; several find one another at a socket that the first of them is given."""
        if self.settings.ranks == 1:
            return [await _spawn("trainer", log_folder, ["0", "0"])]
        children: list[Child[FromRank]] = []
        with socket.create_server(("127.0.0.1", 0)) as meeting:
            port, listening = str(meeting.getsockname()[1]), meeting.fileno()
            try:
                children.append(await _spawn("trainer-0", log_folder, ["0", port, str(listening)], [listening]))
                for rank in range(1, self.settings.ranks):
                    children.append(await _spawn(f"trainer-{rank}", log_folder, [str(rank), port]))  # noqa: PERF401
            except BaseException:
                await asyncio.gather(*(child.stop() for child in children))
                raise
        return children


async def _spawn(
    name: str, log_folder: Path, arguments: Sequence[str], pass_fds: Sequence[int] = ()
) -> Child[FromRank]:
    return await Child.spawn(
        name,
        "staleflow.trainer.rank",
        log_path=log_folder / f"{name}.log",
        receives=FromRank,  # type: ignore[arg-type]
        error=TrainerError,
        arguments=arguments,
        pass_fds=pass_fds,
    )
