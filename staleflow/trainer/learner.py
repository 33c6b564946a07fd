"""GRPO on plain torch: a batch of groups in, one optimizer update per minibatch out.

Knows nothing of processes, versions or files other than model folders; the tests call it directly, and
``local_server`` puts a wire around it. The loss of an update is the mean over its sampled tokens, whatever the
micro-batches, so gradients do not depend on how the tokens were packed.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from staleflow.errors import TrainerError
from staleflow.trainer import state
from staleflow.trainer.local import TrainerSettings
from staleflow.trainer.losses import LOSSES, Clip, group_advantages
from staleflow.types import StepMetrics, TrainBatch, Trajectory

DECAYED_SHARE = 0.1
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


class Sequences(NamedTuple):
    """Trajectories up to their last sampled token, right-padded to one length.

    All but two are ``[sequences, tokens]``: the model reads ``inputs`` and at each position predicts ``targets``,
    the token that follows; ``sampled`` and ``behaviour_logprobs`` speak of the target. ``sampled`` is false where
    the target is injected or padding. ``advantages`` and ``lengths`` are ``[sequences]``.
    """

    inputs: Tensor
    targets: Tensor
    sampled: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    lengths: Tensor

    def rows(self, chosen: Tensor, device: str) -> "Sequences":
        """The chosen sequences, without columns that are padding in all of them."""
        longest = int(self.lengths[chosen].max())
        return Sequences(
            self.inputs[chosen, :longest].to(device),
            self.targets[chosen, :longest].to(device),
            self.sampled[chosen, :longest].to(device),
            self.behaviour_logprobs[chosen, :longest].to(device),
            self.advantages[chosen].to(device),
            self.lengths[chosen].to(device),
        )


def collate(groups: Sequence[Sequence[Trajectory]], *, normalize: bool) -> Sequences:
    """Stack whole groups, in order, with the advantage of each trajectory."""
    tokens, sampled, behaviour = [], [], []
    for trajectory in (trajectory for group in groups for trajectory in group):
        last = max(index for index, segment in enumerate(trajectory.segments) if segment.sampled)
        segments = trajectory.segments[: last + 1]
        tokens.append([token for segment in segments for token in segment.token_ids])
        sampled.append([segment.sampled for segment in segments for _ in segment.token_ids])
        behaviour.append(
            [
                logprob
                for segment in segments
                for logprob in (segment.logprobs if segment.sampled else [0.0] * len(segment.token_ids))
            ]
        )
    stacked = _padded(tokens, torch.int64)
    advantages = [
        group_advantages(
            torch.tensor([trajectory.reward for trajectory in group], dtype=torch.float64), normalize=normalize
        )
        for group in groups
    ]
    return Sequences(
        inputs=stacked[:, :-1],
        targets=stacked[:, 1:],
        sampled=_padded(sampled, torch.bool)[:, 1:],
        behaviour_logprobs=_padded(behaviour, torch.float32)[:, 1:],
        advantages=torch.cat(advantages).float(),
        lengths=torch.tensor([len(row) - 1 for row in tokens]),
    )


def _padded(rows: Sequence[list[int] | list[bool] | list[float]], dtype: torch.dtype) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)


class _Update(NamedTuple):
    """What one optimizer update measured; the sums run over the tokens that have an advantage."""

    loss: float
    gradient_norm: float
    entropy_sum: float
    clipped_sum: float
    lag_sum: float
    measured_tokens: int
    tokens: int


class Learner:
    """A causal LM with its optimizer."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
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

    def step(self, batch: TrainBatch) -> StepMetrics:
        """Train on one batch; raises :class:`TrainerError` when the loss or the gradient is not finite.

        The update that failed has changed nothing; with several minibatches those before it have been made.
        """
        settings = self._settings
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = settings.learning_rate * self._learning_rate_share(batch.step)
        sequences = collate(batch.groups, normalize=settings.normalize_advantages)
        rows = torch.arange(len(sequences.inputs)).split([len(group) for group in batch.groups])
        count = min(settings.minibatches, len(rows))
        minibatches = [
            torch.cat(rows[len(rows) * index // count : len(rows) * (index + 1) // count]) for index in range(count)
        ]
        needs_proximal = settings.loss != "ppo" and count > 1
        proximal = self._logprobs_of_all(sequences) if needs_proximal else None
        updates = [self._update(sequences, chosen, proximal, batch.step) for chosen in minibatches]
        measured = max(sum(update.measured_tokens for update in updates), 1)
        # Later minibatches see weights that this step has already changed.
        first = updates[0]
        return StepMetrics(
            loss=sum(update.loss * update.tokens for update in updates) / sum(update.tokens for update in updates),
            gradient_norm=max(update.gradient_norm for update in updates),
            entropy=sum(update.entropy_sum for update in updates) / measured,
            clipped_share=sum(update.clipped_sum for update in updates) / measured,
            policy_lag_kl=first.lag_sum / max(first.measured_tokens, 1),
            tokens=sum(update.tokens for update in updates),
        )

    def _learning_rate_share(self, step: int) -> float:
        """Part of the learning rate that step number ``step``, from 0, trains with: a function of nothing else."""
        warmup, decay = self._settings.warmup_steps, self._settings.decay_steps
        warmed = min(1.0, (step + 1) / (warmup + 1))
        decayed = 1.0 if decay is None else max(DECAYED_SHARE, 1.0 - (1.0 - DECAYED_SHARE) * step / decay)
        return warmed * decayed

    def write_weights(self, path: Path) -> None:
        """Write every parameter, by name and once if tied, as safetensors."""
        save_file({name: tensor.detach().contiguous() for name, tensor in self._model.named_parameters()}, path)

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

    def _update(self, sequences: Sequences, rows: Tensor, proximal: Tensor | None, step: int) -> "_Update":
        settings = self._settings
        tokens = int(sequences.sampled[rows].sum())
        # Both losses are proportional to the advantage. A sequence without one has no gradient: it counts in the
        # mean but need not be computed, which in groups of equal rewards saves all of the work.
        learning = rows[sequences.advantages[rows] != 0]
        if len(learning) == 0:
            return _Update(0.0, 0.0, 0.0, 0.0, 0.0, 0, tokens)
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        self._optimizer.zero_grad(set_to_none=True)
        for chosen in self._micro_batches(sequences, learning):
            part = sequences.rows(chosen, self._device)
            anchor = None if proximal is None else proximal[chosen, : part.sampled.shape[1]].to(self._device)
            loss, measured = self._loss(part, anchor, tokens)
            loss.backward()
            sums += measured
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), settings.max_gradient_norm).item()
        loss_sum, entropy_sum, clipped_sum, lag_sum = sums.tolist()
        if not (math.isfinite(norm) and math.isfinite(loss_sum)):
            raise TrainerError(f"step {step}: loss {loss_sum} and gradient norm {norm}; this update was not made")
        self._optimizer.step()
        measured_tokens = int(sequences.sampled[learning].sum())
        return _Update(loss_sum, norm, entropy_sum, clipped_sum, lag_sum, measured_tokens, tokens)

    def _loss(self, part: Sequences, proximal: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
        """The part's share of a mean over ``tokens``, and its sums of loss, entropy, clipped tokens and lag."""
        settings = self._settings
        policy, entropy = self._logprobs(part)
        detached = policy.detach()
        # Before the first update of a step the policy is the proximal policy.
        anchor = detached if proximal is None else proximal[part.sampled]
        behaviour = part.behaviour_logprobs[part.sampled]
        advantages = part.advantages.repeat_interleave(part.sampled.sum(1))
        clip = Clip(settings.clip_low, settings.clip_high)
        token_loss = LOSSES[settings.loss](policy, anchor, behaviour, advantages, clip)
        loss = token_loss.loss.sum() / tokens
        lag = (detached - behaviour).double()
        measured = (loss.detach(), entropy.sum(), token_loss.clipped.sum(), (lag.exp() - 1 - lag).sum())
        return loss, torch.stack([value.double() for value in measured])

    def _micro_batches(self, sequences: Sequences, rows: Tensor) -> Iterator[Tensor]:
        # Neighbours in length share a micro-batch, so that little of it is padding.
        lengths: list[int] = sequences.lengths.tolist()
        chosen: list[int] = []
        for row in sorted(rows.tolist(), key=lengths.__getitem__):
            if chosen and (len(chosen) + 1) * lengths[row] > self._settings.micro_batch_tokens:
                yield torch.tensor(chosen)
                chosen = []
            chosen.append(row)
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
    def _logprobs_of_all(self, sequences: Sequences) -> Tensor:
        result = torch.zeros_like(sequences.behaviour_logprobs)
        for chosen in self._micro_batches(sequences, torch.arange(len(result))):
            part = sequences.rows(chosen, self._device)
            logprobs, _ = self._logprobs(part)
            padded = torch.zeros_like(part.behaviour_logprobs)
            padded[part.sampled] = logprobs
            result[chosen, : padded.shape[1]] = padded.cpu()
        return result
