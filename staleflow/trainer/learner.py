"""GRPO on plain torch: a batch of groups in, one optimizer update per minibatch out.

Knows nothing of processes, versions or files other than model folders; the tests call it directly, and
``local_server`` puts a wire around it.

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
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from staleflow.errors import TrainerError
from staleflow.trainer import state
from staleflow.trainer.aggregation import token_shares
from staleflow.trainer.faults import NonfiniteUpdates, Spoilt, refuse_unfit, unreadable, unreadable_rows
from staleflow.trainer.local import TrainerSettings
from staleflow.trainer.loss_metrics import Measured, measure
from staleflow.trainer.losses import TokenLoss, Tokens, resolve
from staleflow.trainer.sequences import Sequences, collate
from staleflow.types import ModelLimits, SkippedUpdate, StepMetrics, TrainBatch

DECAYED_SHARE = 0.1
WEIGHTS_FILE = "weights.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class _Read(NamedTuple):
    """What a pass without gradients has read: ``[sequences, tokens]``, 0 where nothing was sampled or read."""

    logprobs: Tensor
    entropy: Tensor


class _Update(NamedTuple):
    """The sequences of one optimizer update.

    ``shares`` is how much a token of each sequence counts, ``[sequences]``. ``start`` was read before the first of
    several updates, and is None where the loss does not need it; ``first`` says that nothing has changed since.
    """

    sequences: Sequences
    rows: Tensor
    shares: Tensor
    start: _Read | None
    first: bool


class _Made(NamedTuple):
    """An update that was made, and what was measured in it."""

    loss: float
    gradient_norm: float
    measured: list[Measured]


class Learner:
    """A causal LM with its optimizer."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._loss = resolve(settings.loss)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=torch.float32, local_files_only=True
        ).to(self._device)  # type: ignore[arg-type]
        # Dropout would make the trainer's logprobs differ from the engine's for equal weights.
        self._model.eval()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        dumps = None if settings.dump_folder is None else Path(settings.dump_folder)
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
        sequences = collate(batch, settings.advantages)
        advantages, spoiling = sequences.advantages.tolist(), unreadable_rows(batch)
        self._nonfinite.refuse_unreadable(batch, spoiling, advantages)
        rows = torch.arange(len(sequences.inputs)).split([len(group) for group in batch.groups])
        count = min(settings.minibatches, len(rows))
        start = self._read(sequences, self._needed(sequences)) if self._loss.uses_proximal and count > 1 else None
        made: list[_Made] = []
        skipped: list[SkippedUpdate] = []
        for index in range(count):
            chosen = torch.cat(rows[len(rows) * index // count : len(rows) * (index + 1) // count])
            update = self._planned(sequences, chosen, start, first=not made)
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
        """Write every parameter, by name and once if tied, to a safetensors file in a folder that exists."""
        parameters = {name: tensor.detach().contiguous() for name, tensor in self._model.named_parameters()}
        save_file(parameters, folder / WEIGHTS_FILE)

    def save(self, folder: Path) -> None:
        """Write a folder that transformers loads; an older folder of that name stays whole until this one is."""
        partial, replaced = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".replaced"))
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
        self._model.save_pretrained(partial)
        for name in TOKENIZER_FILES:
            source = Path(self._settings.model) / name
            if source.exists():
                shutil.copy(source, partial / name)
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer; the learning rate is a function of the step, and nothing here is random."""
        state.save(self._model, self._optimizer, folder)

    def load_state(self, folder: Path) -> None:
        """Become what was written; raises :class:`TrainerError` when it is of another model."""
        state.load(self._model, self._optimizer, folder)

    # -- one update ----------------------------------------------------------------------------------------------

    def _planned(self, sequences: Sequences, rows: Tensor, start: _Read | None, *, first: bool) -> _Update:
        lengths = sequences.sampled[rows].sum(1)
        shares = torch.zeros(len(sequences.inputs))
        shares[rows] = token_shares(lengths, self._settings.aggregation, self._settings.longest_tokens).float()
        return _Update(sequences, rows, shares, start, first)

    def _update(self, update: _Update) -> _Made | Spoilt:
        """Make it, unless it is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        differentiate = self._backward_from_slopes if self._loss.whole_update else self._backward_by_parts
        loss, measured = differentiate(update)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_gradient_norm).item()
        if not (math.isfinite(norm) and math.isfinite(loss)):
            # Nothing of it must be left, neither for the next update nor for a checkpoint.
            self._optimizer.zero_grad(set_to_none=True)
            return Spoilt(f"loss {loss}, gradient norm {norm}", self._spoiling(update))
        # Without a gradient there is nothing to learn; weight decay and momentum must not move weights on their own.
        if norm > 0:
            self._optimizer.step()
        return _Made(loss, norm, measured)

    def _spoiling(self, update: _Update) -> list[int]:
        """Rows whose own logprobs or loss are not finite; all that were computed if only their gradient is not."""
        sequences, rows = update.sequences, update.rows
        if not self._loss.whole_update:
            rows = rows[sequences.advantages[rows] != 0]
        read = self._read(sequences, rows[:0])
        for row in rows:
            # One by one, so that none spoils its neighbours.
            for total, values in zip(read, self._read(sequences, row[None]), strict=True):
                total += values
        whole = sequences.rows(rows, self._device)
        logprobs = _picked(read.logprobs, rows, whole).requires_grad_()
        wrong = ~logprobs.isfinite()
        if not bool(wrong.any()):
            tokens = self._tokens_of(update, rows, whole, logprobs.detach(), _picked(read.entropy, rows, whole))
            wrong = ~self._loss.function(logprobs, tokens).loss.isfinite()
        spoilt = _padded_like(whole, wrong.float()).any(1).cpu()
        found: list[int] = (rows[spoilt] if bool(spoilt.any()) else rows).tolist()
        return found

    def _needed(self, sequences: Sequences) -> Tensor:
        """Which sequences the loss depends on: all, or those with an advantage (``losses`` says when and why)."""
        needed = torch.ones_like(sequences.lengths) if self._loss.whole_update else sequences.advantages
        return needed.nonzero()[:, 0]

    def _backward_by_parts(self, update: _Update) -> tuple[float, list[Measured]]:
        total, parts = torch.zeros((), dtype=torch.float64, device=self._device), []
        for chosen in self._micro_batches(update.sequences, update.rows[update.sequences.advantages[update.rows] != 0]):
            part = update.sequences.rows(chosen, self._device)
            loss, measured = self._loss_of(update, chosen, part, *self._logprobs(part))
            loss.backward()
            total += loss.detach()
            parts.append(measured)
        return total.item(), parts

    def _backward_from_slopes(self, update: _Update) -> tuple[float, list[Measured]]:
        sequences, rows = update.sequences, update.rows
        read = update.start if update.first and update.start is not None else self._read(sequences, rows)
        whole = sequences.rows(rows, self._device)
        logprobs = _picked(read.logprobs, rows, whole).requires_grad_()
        loss, measured = self._loss_of(update, rows, whole, logprobs, _picked(read.entropy, rows, whole))
        [flat] = torch.autograd.grad(loss, logprobs)
        slopes = torch.zeros_like(sequences.behaviour_logprobs)
        slopes[rows, : whole.sampled.shape[1]] = _padded_like(whole, flat).cpu()
        for chosen in self._micro_batches(sequences, rows[(slopes[rows] != 0).any(1)]):
            part = sequences.rows(chosen, self._device)
            logprobs, _ = self._logprobs(part)
            (logprobs * _picked(slopes, chosen, part)).sum().backward()
        return loss.item(), [measured]

    def _loss_of(
        self, update: _Update, chosen: Tensor, part: Sequences, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Measured]:
        """The part's share of the update's loss."""
        detached = logprobs.detach()
        tokens = self._tokens_of(update, chosen, part, detached, entropy)
        token_loss = self._loss.function(logprobs, tokens)
        if not (
            isinstance(token_loss, TokenLoss)
            and token_loss.loss.shape == token_loss.cut.shape == logprobs.shape
            and token_loss.loss.requires_grad
        ):
            raise TrainerError(
                f"the loss must return a TokenLoss of two vectors of {len(logprobs)} tokens, the first with a gradient"
            )
        shares = update.shares[chosen].to(self._device).repeat_interleave(tokens.lengths)
        known = update.first or update.start is not None
        measured = Measured(detached, tokens, token_loss.cut, part.staleness[part.sampled], known)
        return (shares * token_loss.loss).sum(), measured

    def _tokens_of(
        self, update: _Update, chosen: Tensor, part: Sequences, policy_logprobs: Tensor, entropy: Tensor
    ) -> Tokens:
        lengths = part.sampled.sum(1)
        return Tokens(
            # Before the first update of a step the policy is the proximal policy.
            proximal_logprobs=policy_logprobs if update.start is None else _picked(update.start.logprobs, chosen, part),
            behaviour_logprobs=part.behaviour_logprobs[part.sampled],
            advantages=part.advantages.repeat_interleave(lengths),
            entropy=entropy,
            lengths=lengths,
        )

    # -- forward passes ------------------------------------------------------------------------------------------

    def _micro_batches(self, sequences: Sequences, rows: Tensor) -> Iterator[Tensor]:
        # Neighbours in length share a micro-batch, so that little of it is padding.
        lengths: list[int] = sequences.lengths.tolist()
        chosen: list[int] = []
        for row in sorted(rows.tolist(), key=lengths.__getitem__):
            if chosen and (len(chosen) + 1) * lengths[row] > self._settings.micro_batch_tokens:
                yield torch.tensor(chosen)
                chosen = []
            chosen.append(row)
        if chosen:
            yield torch.tensor(chosen)

    def _logprobs(self, part: Sequences) -> tuple[Tensor, Tensor]:
        """Logprob of every sampled token and entropy of what it was sampled from, both ``[sampled tokens]``."""
        # Causal attention never looks right, so right padding needs no mask.
        logits = self._model(input_ids=part.inputs, use_cache=False).logits[part.sampled]
        logprobs = (logits.float() / self._settings.temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, part.targets[part.sampled][:, None]).squeeze(-1), entropy

    @torch.no_grad()
    def _read(self, sequences: Sequences, rows: Tensor) -> _Read:
        read = _Read(torch.zeros_like(sequences.behaviour_logprobs), torch.zeros_like(sequences.behaviour_logprobs))
        for chosen in self._micro_batches(sequences, rows):
            part = sequences.rows(chosen, self._device)
            for result, values in zip(read, self._logprobs(part), strict=True):
                result[chosen, : part.sampled.shape[1]] = _padded_like(part, values).cpu()
        return read


def _picked(values: Tensor, chosen: Tensor, part: Sequences) -> Tensor:
    """Of values ``[sequences, tokens]`` those of the part's sampled tokens, ``[sampled tokens]``."""
    return values[chosen, : part.sampled.shape[1]].to(part.sampled.device)[part.sampled]


def _padded_like(part: Sequences, values: Tensor) -> Tensor:
    """The inverse: ``[sampled tokens]`` in their places, 0 elsewhere."""
    return torch.zeros_like(part.behaviour_logprobs).masked_scatter(part.sampled, values)
