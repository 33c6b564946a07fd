"""GRPO on plain torch: a batch of groups in, one optimizer update per minibatch out.

Knows nothing of processes, versions or files other than model folders; the tests call it directly, and ``rank`` puts a
wire around it. Every rank has one (``docs/design/trainer.md``), a trainer of one process is the only rank.

Data flow of a step::

    batch -> collate -> Sequences -> minibatches, each one optimizer update
    [proximal logprobs: one pass without gradients, before the first of several updates, if the loss reads them]
    update of a loss that looks at tokens or sequences:
        per micro-batch: forward -> loss -> backward
    update of a loss that must see all tokens of the update:
        one pass without gradients -> loss of all tokens -> its slope in each token's logprob
        per micro-batch: forward -> sum of slope times logprob -> backward
    what the losses saw and said -> loss_metrics

By the chain rule both ways give the gradient of one loss over all tokens of the update, so gradients do not depend on
how the tokens were packed, whatever the loss. The second costs one more forward pass.

Each rank passes its own micro-batches. What it reads it writes into its rows of tables ``[sequences, tokens]``, and the
sum over ranks gives every rank the whole tables. Between passes all ranks hold equal values, and so decide alike.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from staleflow.errors import TrainerError
from staleflow.trainer import sharding, state, weights
from staleflow.trainer.aggregation import token_shares
from staleflow.trainer.faults import NonfiniteUpdates, Spoilt, refuse_unfit, unreadable, unreadable_rows
from staleflow.trainer.local import TrainerSettings
from staleflow.trainer.loss_metrics import Measured, measure
from staleflow.trainer.losses import TokenLoss, Tokens, divergence, resolve
from staleflow.trainer.micro_batches import planned
from staleflow.trainer.sequences import Sequences, collate
from staleflow.trainer.world import World
from staleflow.types import ModelLimits, SkippedUpdate, StepMetrics, TrainBatch

DECAYED_SHARE = 0.1
PACKED_TOLERANCE = 0.05


class _Read(NamedTuple):
    """What a pass without gradients has read: ``[sequences, tokens]``, 0 where nothing was sampled or read."""

    logprobs: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, sequences: Sequences) -> "_Read":
        """Nothing yet."""
        return cls(torch.zeros_like(sequences.behaviour_logprobs), torch.zeros_like(sequences.behaviour_logprobs))


class _Update(NamedTuple):
    """The sequences of one optimizer update.

    ``shares`` is how much a token of each sequence counts, ``[sequences]``. ``start`` was read before the first of
    several updates, and is None where the loss does not need it; ``first`` says that nothing has changed since.
    ``reference`` are the reference model's logprobs, ``[sequences, tokens]``, if there is one.
    """

    sequences: Sequences
    rows: Tensor
    shares: Tensor
    start: _Read | None
    first: bool
    reference: Tensor | None


class _Made(NamedTuple):
    """An update that was made, and what was measured in it."""

    loss: float
    gradient_norm: float
    measured: list[Measured]


class Learner:
    """A causal LM with its optimizer, or one rank's part of them.

    ``note`` is what the user should know of how it runs.
    """

    def __init__(self, settings: TrainerSettings, world: World | None = None) -> None:
        self._settings = settings
        self._world = World() if world is None else world
        self._loss = resolve(settings.loss)
        self._device = self._world.device
        self._nothing = Sequences.of_tokens(torch.zeros(1, 1).long(), self._device, sampled=False)
        self._sharded, self.note = self._may_shard()
        self._model = self._loaded(settings.model)
        self._reference = None if settings.reference is None else self._loaded(settings.reference)
        self._refuse_unfit_settings()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        # Of what all ranks find alike, one writes.
        dumps = None if settings.dump_folder is None or self._world.rank > 0 else Path(settings.dump_folder)
        self._nonfinite = NonfiniteUpdates(settings.on_nonfinite, dumps)

    @property
    def limits(self) -> ModelLimits:
        """What the model can be given."""
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return ModelLimits(self._model.get_input_embeddings().num_embeddings, longest)

    def step(self, batch: TrainBatch) -> StepMetrics:
        """Train on one batch.

        An update whose loss, gradient or recorded logprobs are not finite changes nothing, and is skipped or raises
        :class:`TrainerError`, as ``on_nonfinite`` says; with several minibatches those before it have been made. A
        batch that cannot be trained on raises :class:`TrainerError` before anything is computed.
        """
        settings = self._settings
        refuse_unfit(batch, self.limits)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = settings.learning_rate * self._learning_rate_share(batch.step)
        sequences = self._collated(batch)
        advantages, spoiling = sequences.advantages.tolist(), unreadable_rows(batch)
        self._nonfinite.refuse_unreadable(batch, spoiling, advantages)
        rows = torch.arange(len(sequences.inputs)).split([len(group) for group in batch.groups])
        count = min(settings.minibatches, len(rows))
        needed = self._needed(sequences, torch.arange(len(sequences.inputs)))
        start = self._read(sequences, needed) if self._loss.uses_proximal and count > 1 else None
        reference = None if self._reference is None else self._read_by(self._reference, sequences, needed).logprobs
        made: list[_Made] = []
        skipped: list[SkippedUpdate] = []
        for index in range(count):
            chosen = torch.cat(rows[len(rows) * index // count : len(rows) * (index + 1) // count])
            update = self._planned(sequences, chosen, start, reference, first=not made)
            bad = spoiling.intersection(chosen.tolist())
            result = unreadable(bad) if bad else self._update(update)
            if isinstance(result, Spoilt):
                skipped.append(self._nonfinite.spoilt(batch, index, result, advantages))
            else:
                self._nonfinite.made()
                made.append(result)
        metrics = measure(
            [part for update in made for part in update.measured],
            loss=sum(update.loss for update in made) / max(len(made), 1),
            gradient_norm=max((update.gradient_norm for update in made), default=0.0),
            tokens=int(sequences.sampled.sum()),
        )
        return msgspec.structs.replace(
            metrics,
            skipped_updates=len(skipped),
            skipped=skipped,
            updates_without_gradient=sum(update.gradient_norm == 0 for update in made),
        )

    def _learning_rate_share(self, step: int) -> float:
        """Part of the learning rate that step number ``step``, from 0, trains with: a function of nothing else."""
        warmup, decay = self._settings.warmup_steps, self._settings.decay_steps
        warmed = min(1.0, (step + 1) / (warmup + 1))
        decayed = 1.0 if decay is None else max(DECAYED_SHARE, 1.0 - (1.0 - DECAYED_SHARE) * step / decay)
        return warmed * decayed

    def write_weights(self, folder: Path) -> None:
        """Write this rank's share of the parameters, by name and once if tied, to a file in a folder that exists."""
        weights.write_share(self._model, self._world, folder)

    def save(self, folder: Path) -> None:
        """Write a folder that transformers loads; an older folder of that name stays whole until this one is."""
        weights.save_folder(self._model, self._world, folder, Path(self._settings.model))

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer; the learning rate is a function of the step, and nothing here is random."""
        state.save(self._model, self._optimizer, folder, self._world)

    def load_state(self, folder: Path) -> None:
        """Become what was written; raises :class:`TrainerError` when it is of another model."""
        state.load(self._model, self._optimizer, folder)

    # -- models --------------------------------------------------------------------------------------------------

    def _may_shard(self) -> tuple[bool, str | None]:
        """Whether each rank keeps a part of the model, and what to tell a user who wanted that and cannot have it."""
        if self._world.size == 1 or not self._settings.sharded:
            return False, None
        reason = sharding.why_not_sharded(self._world)
        return reason is None, reason and f"FSDP2 does not run here, so every rank keeps all of the model: {reason}"

    def _loaded(self, folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        # Dropout would make the trainer's logprobs differ from the engine's for equal weights.
        model.eval()
        if self._settings.activation_checkpointing:
            sharding.recompute_layers(model)
        if self._sharded:
            # Moves layer by layer: no device ever holds the whole model.
            sharding.shard(model, self._world)
        model.to(self._device)  # type: ignore[arg-type]
        return model

    def _refuse_unfit_settings(self) -> None:
        """Raise :class:`TrainerError` where the settings ask for what the models cannot do."""
        vocabulary = self._model.config.get_text_config().vocab_size
        if self._reference is not None and self._reference.config.get_text_config().vocab_size != vocabulary:
            raise TrainerError(
                f"the reference {self._settings.reference} has another vocabulary than {self._settings.model}: "
                f"{self._reference.config.get_text_config().vocab_size} and {vocabulary} tokens"
            )
        if self._settings.packing:
            self._refuse_packing_that_leaks()

    @torch.no_grad()
    def _refuse_packing_that_leaks(self) -> None:
        """Two equal sequences, end to end, must have equal logprobs."""
        tokens = torch.arange(4).expand(2, 4) % self._model.config.get_text_config().vocab_size
        logprobs, _ = self._logprobs(self._model, Sequences.of_tokens(tokens, self._device, sampled=True))
        sharding.part_again(self._model)
        first, second = logprobs.chunk(2)
        if (gap := float((first - second).abs().max())) > PACKED_TOLERANCE:
            raise TrainerError(
                "packing=True, but the model does not keep packed sequences apart (logprobs of equal ones differ by "
                f"{gap:.2g}): leave it at False"
            )

    # -- one update ----------------------------------------------------------------------------------------------

    def _collated(self, batch: TrainBatch) -> Sequences:
        sequences = collate(batch, self._settings.advantages)
        # Which of them are exactly 0 may depend on how a machine rounds, and decides what is computed.
        return sequences._replace(advantages=self._world.as_first(sequences.advantages))

    def _planned(
        self, sequences: Sequences, rows: Tensor, start: _Read | None, reference: Tensor | None, *, first: bool
    ) -> _Update:
        lengths = sequences.sampled[rows].sum(1)
        shares = torch.zeros(len(sequences.inputs))
        shares[rows] = token_shares(lengths, self._settings.aggregation, self._settings.longest_tokens).float()
        return _Update(sequences, rows, shares, start, first, reference)

    def _update(self, update: _Update) -> _Made | Spoilt:
        """Make it, unless it is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        differentiate = self._backward_from_slopes if self._loss.whole_update else self._backward_by_parts
        loss, measured = differentiate(update)
        sharding.sum_gradients(self._model, self._world)
        norm = sharding.gradient_norm(self._model, self._world)
        # All ranks have the same loss and norm here, and so do the same.
        if not (math.isfinite(norm.item()) and math.isfinite(loss)):
            # Nothing of it must be left, neither for the next update nor for a checkpoint.
            self._optimizer.zero_grad(set_to_none=True)
            return Spoilt(f"loss {loss}, gradient norm {norm.item()}", self._spoiling(update))
        # Without a gradient there is nothing to learn; weight decay and momentum must not move weights on their own.
        if norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._model.parameters(), self._settings.max_gradient_norm, norm)
            self._optimizer.step()
        return _Made(loss, norm.item(), measured)

    def _spoiling(self, update: _Update) -> list[int]:
        """Rows whose own logprobs or loss are not finite; all that were computed if only their gradient is not."""
        sequences, rows = update.sequences, self._needed(update.sequences, update.rows)
        read = _Read.of(sequences)
        for row in rows:
            # One by one, so that none spoils its neighbours.
            for total, values in zip(read, self._read(sequences, row[None]), strict=True):
                total += values
        whole = sequences.rows(rows, self._device)
        logprobs = _picked(read.logprobs, rows, whole).requires_grad_()
        wrong = ~logprobs.isfinite()
        if not bool(wrong.any()):
            loss, _ = self._token_losses(update, rows, whole, logprobs, _picked(read.entropy, rows, whole))
            wrong = ~loss.isfinite()
        spoilt = torch.zeros_like(sequences.behaviour_logprobs)
        _fill(spoilt, rows, whole, wrong.float())
        found: list[int] = spoilt.any(1).nonzero()[:, 0].tolist()
        return found or rows.tolist()

    def _needed(self, sequences: Sequences, rows: Tensor) -> Tensor:
        """Which of the rows the loss depends on: all, or those with an advantage (``losses`` says when and why)."""
        if self._loss.whole_update or self._reference is not None:
            return rows
        return rows[sequences.advantages[rows] != 0]

    def _backward_by_parts(self, update: _Update) -> tuple[float, list[Measured]]:
        sequences, rows = update.sequences, self._needed(update.sequences, update.rows)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        read, cut = _Read.of(sequences), torch.zeros_like(sequences.behaviour_logprobs)
        for chosen, part in self._passes(sequences, rows):
            logprobs, entropy = self._logprobs(self._model, part)
            if not len(chosen):
                logprobs.sum().backward()
                continue
            loss, cut_here = self._loss_of(update, chosen, part, logprobs, entropy)
            loss.backward()
            total += loss.detach()
            for table, values in ((read.logprobs, logprobs), (read.entropy, entropy), (cut, cut_here.float())):
                _fill(table, chosen, part, values)
        self._share(sequences, [*read, cut])
        return self._world.sum(total).item(), self._measured(update, rows, read, cut)

    def _backward_from_slopes(self, update: _Update) -> tuple[float, list[Measured]]:
        sequences, rows = update.sequences, update.rows
        read = update.start if update.first and update.start is not None else self._read(sequences, rows)
        whole = sequences.rows(rows, self._device)
        logprobs = _picked(read.logprobs, rows, whole).requires_grad_()
        loss, cut_here = self._loss_of(update, rows, whole, logprobs, _picked(read.entropy, rows, whole))
        [flat] = torch.autograd.grad(loss, logprobs)
        slopes, cut = (torch.zeros_like(sequences.behaviour_logprobs) for _ in range(2))
        # A loss may add up in another order on another machine, or draw numbers.
        _fill(slopes, rows, whole, self._world.as_first(flat.contiguous()))
        _fill(cut, rows, whole, cut_here.float())
        for chosen, part in self._passes(sequences, rows[(slopes[rows] != 0).any(1)]):
            logprobs, _ = self._logprobs(self._model, part)
            weighed = logprobs * _picked(slopes, chosen, part) if len(chosen) else logprobs
            weighed.sum().backward()
        return self._world.as_first(loss.detach()).item(), self._measured(update, rows, read, cut)

    def _loss_of(
        self, update: _Update, chosen: Tensor, part: Sequences, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The part's share of the update's loss, and which of its tokens are cut."""
        loss, cut = self._token_losses(update, chosen, part, logprobs, entropy)
        shares = update.shares[chosen].to(self._device).repeat_interleave(part.sampled.sum(1))
        return (shares * loss).sum(), cut

    def _token_losses(
        self, update: _Update, chosen: Tensor, part: Sequences, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of every sampled token, and which of them are cut, both ``[sampled tokens]``."""
        token_loss = self._loss.function(logprobs, self._tokens(update, chosen, part, logprobs.detach(), entropy))
        if not (
            isinstance(token_loss, TokenLoss)
            and token_loss.loss.shape == token_loss.cut.shape == logprobs.shape
            and token_loss.loss.requires_grad
        ):
            raise TrainerError(
                f"the loss must return a TokenLoss of two vectors of {len(logprobs)} tokens, the first with a gradient"
            )
        if update.reference is None:
            return token_loss.loss, token_loss.cut
        divergences = divergence(logprobs, _picked(update.reference, chosen, part))
        return token_loss.loss + self._settings.kl_weight * divergences, token_loss.cut

    @staticmethod
    def _tokens(update: _Update, chosen: Tensor, part: Sequences, logprobs: Tensor, entropy: Tensor) -> Tokens:
        lengths = part.sampled.sum(1)
        return Tokens(
            # Before the first update of a step the policy is the proximal policy.
            proximal_logprobs=logprobs if update.start is None else _picked(update.start.logprobs, chosen, part),
            behaviour_logprobs=part.behaviour_logprobs[part.sampled],
            advantages=part.advantages.repeat_interleave(lengths),
            entropy=entropy,
            lengths=lengths,
        )

    def _measured(self, update: _Update, rows: Tensor, read: _Read, cut: Tensor) -> list[Measured]:
        """What the loss was given and has said for the rows, on all ranks together."""
        if not len(rows):
            return []
        part = update.sequences.rows(rows, "cpu")
        logprobs = _picked(read.logprobs, rows, part)
        return [
            Measured(
                policy_logprobs=logprobs,
                tokens=self._tokens(update, rows, part, logprobs, _picked(read.entropy, rows, part)),
                cut=_picked(cut, rows, part) != 0,
                staleness=part.staleness[part.sampled],
                proximal_known=update.first or update.start is not None,
                reference_logprobs=None if update.reference is None else _picked(update.reference, rows, part),
            )
        ]

    # -- forward passes ------------------------------------------------------------------------------------------

    def _passes(self, sequences: Sequences, rows: Tensor) -> Iterator[tuple[Tensor, Sequences]]:
        """The micro-batches of this rank: which rows, and those rows. Some may be empty, for others' sake."""
        plan = planned(
            sequences.lengths[rows].tolist(),
            self._world.size,
            self._settings.micro_batch_tokens,
            packed=self._settings.packing,
            even=self._sharded,
        )
        for places in plan[self._world.rank]:
            chosen = rows[places]
            yield chosen, sequences.rows(chosen, self._device) if places else self._nothing

    def _logprobs(self, model: Any, part: Sequences) -> tuple[Tensor, Tensor]:
        """Logprob of every sampled token and entropy of what it was sampled from, both ``[sampled tokens]``."""
        logprobs = (self._logits(model, part).float() / self._settings.temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, part.targets[part.sampled][:, None]).squeeze(-1), entropy

    def _logits(self, model: Any, part: Sequences) -> Tensor:
        """Before every sampled token, ``[sampled tokens, vocabulary]``."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.dtype == "bfloat16"):
            if not self._settings.packing:
                # Causal attention never looks right, so right padding needs no mask.
                padded: Tensor = model(input_ids=part.inputs, use_cache=False).logits
                return padded[part.sampled]
            positions = torch.arange(part.inputs.shape[1], device=self._device).expand_as(part.inputs)
            present = positions < part.lengths[:, None]
            # Positions that begin anew are what transformers makes a mask of, block by block.
            row = {"input_ids": part.inputs[present][None], "position_ids": positions[present][None]}
            packed: Tensor = model(**row, use_cache=False).logits
            return packed[0, part.sampled[present]]

    def _read(self, sequences: Sequences, rows: Tensor) -> _Read:
        return self._read_by(self._model, sequences, rows)

    @torch.no_grad()
    def _read_by(self, model: Any, sequences: Sequences, rows: Tensor) -> _Read:
        read = _Read.of(sequences)
        for chosen, part in self._passes(sequences, rows):
            values = self._logprobs(model, part)
            if len(chosen):
                for table, own in zip(read, values, strict=True):
                    _fill(table, chosen, part, own)
        sharding.part_again(model)
        self._share(sequences, read)
        return read

    def _share(self, sequences: Sequences, tables: Sequence[Tensor]) -> None:
        """Sum tables over ranks, each of which has filled in its own rows: exactly, since all else is 0."""
        if self._world.size > 1:
            values = self._world.sum(torch.stack([table[sequences.sampled] for table in tables]))
            for table, own in zip(tables, values, strict=True):
                table[sequences.sampled] = own


def _picked(values: Tensor, chosen: Tensor, part: Sequences) -> Tensor:
    """Of values ``[sequences, tokens]`` those of the part's sampled tokens, ``[sampled tokens]``."""
    return values[chosen, : part.sampled.shape[1]].to(part.sampled.device)[part.sampled]


def _fill(table: Tensor, chosen: Tensor, part: Sequences, values: Tensor) -> None:
    """The inverse: put ``[sampled tokens]`` in their places of ``[sequences, tokens]``."""
    padded = torch.zeros_like(part.behaviour_logprobs).masked_scatter(part.sampled, values.detach())
    table[chosen, : part.sampled.shape[1]] = padded.cpu()
