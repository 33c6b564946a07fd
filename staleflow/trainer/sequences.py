"""A train batch as tensors: trajectories side by side, each token with all that training must know of it."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from staleflow.trainer.advantages import advantages
from staleflow.trainer.loss_settings import AdvantageKind
from staleflow.types import Segment, TrainBatch

Value = TypeVar("Value", int, float)


class Sequences(NamedTuple):
    """Trajectories up to their last sampled token, right-padded to one length.

    All but two are ``[sequences, tokens]``: the model reads ``inputs`` and at each position predicts ``targets``,
    the token that follows; ``sampled``, ``behaviour_logprobs`` and ``staleness`` speak of the target. ``sampled`` is
    false where the target is injected or padding. ``advantages`` and ``lengths`` are ``[sequences]``.
    """

    inputs: Tensor
    targets: Tensor
    sampled: Tensor
    behaviour_logprobs: Tensor
    staleness: Tensor
    advantages: Tensor
    lengths: Tensor

    @classmethod
    def of_tokens(cls, tokens: Tensor, device: torch.device, *, sampled: bool) -> "Sequences":
        """Only something to pass through a model: ``tokens``, without padding, all of them sampled or none."""
        nothing = torch.zeros(tokens.shape)
        lengths = torch.full((len(tokens),), tokens.shape[1])
        one = cls(tokens, tokens, nothing.bool() | sampled, nothing, nothing.long(), nothing[:, 0], lengths)
        return cls(*(each.to(device) for each in one))

    def rows(self, chosen: Tensor, device: torch.device | str) -> "Sequences":
        """The chosen sequences, without columns that are padding in all of them."""
        longest = int(self.lengths[chosen].max())
        return Sequences(*((each[chosen, :longest] if each.dim() == 2 else each[chosen]).to(device) for each in self))


def collate(batch: TrainBatch, kind: AdvantageKind) -> Sequences:
    """Stack whole groups, in order, with the advantage of each trajectory; the batch must be fit to train on."""
    tokens, sampled, behaviour, staleness = [], [], [], []
    for trajectory in batch.trajectories:
        segments = trajectory.trained_segments
        tokens.append(list(chain.from_iterable(segment.token_ids for segment in segments)))
        sampled.append([segment.sampled for segment in segments for _ in segment.token_ids])
        behaviour.append(_per_token(segments, [segment.logprobs for segment in segments], 0.0))
        gaps = [[batch.step - version for version in segment.versions] for segment in segments]
        staleness.append(_per_token(segments, gaps, 0))
    stacked = _padded(tokens, torch.int64)
    rewards = [torch.tensor([one.reward for one in group], dtype=torch.float64) for group in batch.groups]
    return Sequences(
        inputs=stacked[:, :-1],
        targets=stacked[:, 1:],
        sampled=_padded(sampled, torch.bool)[:, 1:],
        behaviour_logprobs=_padded(behaviour, torch.float32)[:, 1:],
        staleness=_padded(staleness, torch.int64)[:, 1:],
        advantages=advantages(rewards, kind).float(),
        lengths=torch.tensor([len(row) - 1 for row in tokens]),
    )


def _per_token(segments: list[Segment], values: list[list[Value]], elsewhere: Value) -> list[Value]:
    """The values of sampled segments, in order, with ``elsewhere`` for every injected token between them."""
    return [
        value
        for segment, own in zip(segments, values, strict=True)
        for value in (own if segment.sampled else [elsewhere] * len(segment.token_ids))
    ]


def _padded(rows: Sequence[list[int] | list[bool] | list[float]], dtype: torch.dtype) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)
