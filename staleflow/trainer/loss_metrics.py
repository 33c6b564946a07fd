"""What staleness does to learning, from the tokens of a step: ratios, divergences, and who was cut.

Works on flat vectors of sampled tokens, gathered while the losses were computed, so its cost is nothing beside one
forward pass and its results do not depend on micro-batches or padding. Sums are in double precision.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from staleflow.trainer.losses import MAX_LOG_RATIO, Tokens, divergence
from staleflow.types import Agreement, CutShare, RatioMoments, StepMetrics

LENGTH_SHARES = 10


class Measured(NamedTuple):
    """What a loss was given and what it said, for some of a step's sequences; all but ``tokens`` are ``[tokens]``.

    ``proximal_known`` is false when the proximal logprobs are not those of the start of the step;
    ``reference_logprobs`` are None where there is no reference.
    """

    policy_logprobs: Tensor
    tokens: Tokens
    cut: Tensor
    staleness: Tensor
    proximal_known: bool
    reference_logprobs: Tensor | None = None


def measure(measured: Sequence[Measured], *, loss: float, gradient_norm: float, tokens: int) -> StepMetrics:
    """The metrics of a step from its parts, in any order."""
    if not measured:
        return StepMetrics(loss, gradient_norm, tokens)
    behaviour = _together([part.tokens.behaviour_logprobs for part in measured])
    policy_gaps = _together([part.policy_logprobs for part in measured]) - behaviour
    lengths = torch.cat([part.tokens.lengths.cpu() for part in measured])
    staleness = torch.cat([part.staleness.cpu() for part in measured])
    cut = torch.cat([part.cut.cpu() for part in measured])
    metrics = StepMetrics(
        loss=loss,
        gradient_norm=gradient_norm,
        tokens=tokens,
        measured_tokens=len(cut),
        entropy=_together([part.tokens.entropy for part in measured]).mean().item(),
        cut_share=cut.double().mean().item(),
        policy_ratio=_moments(policy_gaps),
        cut_by_staleness=_cut_by(staleness, cut),
        cut_by_length=_cut_by(_length_classes(lengths).repeat_interleave(lengths), cut),
        reference_k3=_reference_k3(measured),
    )
    return _with_start_of_step(metrics, [part for part in measured if part.proximal_known])


def _reference_k3(measured: Sequence[Measured]) -> float | None:
    strayed = [
        divergence(part.policy_logprobs.double(), part.reference_logprobs.double())
        for part in measured
        if part.reference_logprobs is not None
    ]
    return torch.cat(strayed).mean().item() if strayed else None


def _with_start_of_step(metrics: StepMetrics, known: Sequence[Measured]) -> StepMetrics:
    """Add what can be said only where the proximal logprobs are known."""
    if not known:
        return metrics
    proximal = _together([part.tokens.proximal_logprobs for part in known])
    behaviour = _together([part.tokens.behaviour_logprobs for part in known])
    gaps = proximal - behaviour
    held = gaps.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lengths = torch.cat([part.tokens.lengths.cpu() for part in known])
    staleness = torch.cat([part.staleness.cpu() for part in known])
    fresh = _fresh_throughout(staleness, lengths)
    return msgspec.structs.replace(
        metrics,
        k1=-gaps.mean().item(),
        k3=(held.exp() - 1 - held).mean().item(),
        behaviour_ratio=_moments(gaps),
        agreement=_agreement(proximal[fresh], behaviour[fresh]) if bool(fresh.any()) else None,
    )


def _together(vectors: Sequence[Tensor]) -> Tensor:
    return torch.cat([vector.detach().cpu() for vector in vectors]).double()


def _moments(gaps: Tensor) -> RatioMoments:
    ratios = gaps.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    mean, second_moment = ratios.mean().item(), ratios.square().mean().item()
    return RatioMoments(mean, second_moment, mean * mean / second_moment)


def _cut_by(keys: Tensor, cut: Tensor) -> dict[int, CutShare]:
    present, which = keys.unique(return_inverse=True)
    tokens = which.bincount(minlength=len(present))
    shares = which.bincount(cut.double(), minlength=len(present)) / tokens
    rows = zip(present.tolist(), tokens.tolist(), shares.tolist(), strict=True)
    return {key: CutShare(count, share) for key, count, share in rows}


def _length_classes(lengths: Tensor) -> Tensor:
    """For each sequence the longest length in its tenth. A sequence's tenth follows from how many are shorter."""
    shorter = torch.searchsorted(lengths.sort().values, lengths)
    share = shorter * LENGTH_SHARES // len(lengths)
    longest = torch.zeros(LENGTH_SHARES, dtype=lengths.dtype).scatter_reduce(0, share, lengths, "amax")
    return longest[share]


def _fresh_throughout(staleness: Tensor, lengths: Tensor) -> Tensor:
    """Which tokens are of trajectories without a stale token: a stale beginning leaves a stale cache behind it."""
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    stale_tokens = sequence.bincount((staleness > 0).double(), minlength=len(lengths))
    return (stale_tokens == 0)[sequence]


def _agreement(trainer: Tensor, engine: Tensor) -> Agreement:
    gaps = trainer - engine
    engine_centred, trainer_centred = engine - engine.mean(), trainer - trainer.mean()
    covariance = (engine_centred * trainer_centred).mean().item()
    engine_variance, trainer_variance = engine_centred.square().mean().item(), trainer_centred.square().mean().item()
    # A constant has no slope; one that says "equal" keeps the figures finite.
    slope = covariance / engine_variance if engine_variance else 1.0
    spread = (engine_variance * trainer_variance) ** 0.5
    return Agreement(
        tokens=len(gaps),
        ratio_mean=gaps.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().mean().item(),
        gap_mean=gaps.mean().item(),
        gap_rms=gaps.square().mean().sqrt().item(),
        slope=slope,
        residual_rms=(trainer_centred - slope * engine_centred).square().mean().sqrt().item(),
        correlation=covariance / spread if spread else 1.0,
    )
