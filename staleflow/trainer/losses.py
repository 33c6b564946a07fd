"""Policy losses for data sampled by older weights, as pure functions on plain tensors.

Three policies appear: *behaviour* (mu) sampled the token, *proximal* (q) is the trainer's policy at the start of the
step, *policy* (pi) is the one being differentiated. Of them come three ratios: ``B = q / mu`` is what staleness has
done, ``U = pi / q`` what this step has done so far, ``E = pi / mu = B U`` both.

Every loss has one signature, ``loss(policy_logprobs, tokens, *, parameters...) -> TokenLoss``. All vectors are flat
float tensors with one entry per *sampled* token, those of a sequence side by side; injected tokens and padding never
get here, so they are in no quantile and no mean. Gradients flow through ``policy_logprobs`` alone: weights and masks
are constants. How tokens are summed up is not a loss's business (``aggregation``).

The unit of every statistic is the optimizer update: the tokens of all its sequences, whatever the micro-batches.
Losses that look at one token or one sequence at a time may be called on parts of an update, as micro-batches never
split a sequence; the others are marked ``whole_update``. Of those that are not, a token without an advantage has loss
and gradient 0 and no influence on others, so sequences of such tokens need not be computed at all.

Log ratios are held within ``+-MAX_LOG_RATIO`` before they are exponentiated: no finite input gives an infinite loss.
"""

import math
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from staleflow.trainer.loss_settings import LossSettings, OwnLoss, SequenceScope, name_of

MAX_LOG_RATIO = 20.0
ROUNDING = 1e-9


class Tokens(NamedTuple):
    """The constants of a loss: all ``[tokens]``, except ``lengths``, ``[sequences]``: tokens of each sequence.

    ``entropy`` is the policy's where the token was sampled.
    """

    proximal_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    lengths: Tensor


class TokenLoss(NamedTuple):
    """Per token: the loss, and whether it was *cut*: masked, clipped, or its weight capped."""

    loss: Tensor
    cut: Tensor


LossFunction: TypeAlias = Callable[..., TokenLoss]


# -- parts -----------------------------------------------------------------------------------------------------------


def _log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    return (numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _beyond_reach(policy_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """Where holding the log ratio has taken its gradient away."""
    return (policy_logprobs - anchor_logprobs).detach().abs() > MAX_LOG_RATIO


def _surrogate(ratio: Tensor, advantages: Tensor, lowest: Tensor | float, highest: Tensor | float) -> TokenLoss:
    """``-min(r A, clip(r) A)``: clipping stops only the move away."""
    free = ratio * advantages
    bounded = torch.clamp(ratio, lowest, highest) * advantages  # type: ignore[arg-type]  # both float or both Tensor
    return TokenLoss(-torch.minimum(free, bounded), bounded < free)


def _ppo(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    clip_low: Tensor | float,
    clip_high: Tensor | float,
) -> TokenLoss:
    ratio = _log_ratio(policy_logprobs, anchor_logprobs).exp()
    loss, cut = _surrogate(ratio, advantages, 1 - clip_low, 1 + clip_high)
    return TokenLoss(loss, cut | _beyond_reach(policy_logprobs, anchor_logprobs))


def _capped(log_weight: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    weight = log_weight.detach().exp()
    return weight.clamp(max=cap), weight > cap


def _masked(log_weight: Tensor, lowest: float, highest: float) -> tuple[Tensor, Tensor]:
    weight = log_weight.detach().exp()
    outside = (weight < lowest) | (weight > highest)
    return weight.masked_fill(outside, 0.0), outside


def _weighted_ppo(
    policy_logprobs: Tensor, tokens: Tokens, weighing: tuple[Tensor, Tensor], clip_low: float, clip_high: float
) -> TokenLoss:
    """``w min(U A, clip(U) A)``, with the weight and where it was cut."""
    weight, cut = weighing
    inner = _ppo(policy_logprobs, tokens.proximal_logprobs.detach(), tokens.advantages, clip_low, clip_high)
    return TokenLoss(weight * inner.loss, inner.cut | cut)


def _over_sequences(values: Tensor, lengths: Tensor, over: SequenceScope) -> Tensor:
    """Sum or mean of each sequence's values, given back to every one of its tokens."""
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    total = torch.zeros(len(lengths), dtype=values.dtype, device=values.device).index_add(0, sequence, values)
    if over == "geometric_mean":
        total = total / lengths.clamp(min=1)
    return total[sequence]


def _sequence_log_weight(tokens: Tokens, over: SequenceScope) -> Tensor:
    gaps = tokens.proximal_logprobs.detach() - tokens.behaviour_logprobs
    return _over_sequences(gaps, tokens.lengths, over).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# -- losses ----------------------------------------------------------------------------------------------------------


def ppo(policy_logprobs: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``-min(E A, clip(E) A)`` (PPO, arXiv 1707.06347, eq. 7; with ``clip_high`` 0.28, DAPO, arXiv 2503.14476)."""
    return _ppo(policy_logprobs, tokens.behaviour_logprobs, tokens.advantages, clip_low, clip_high)


def decoupled_ppo(
    policy_logprobs: Tensor,
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    cap: float,
    beyond: Literal["cap", "mask"],
) -> TokenLoss:
    """``-B min(U A, clip(U) A)``, B capped or masked above ``cap`` (AReaL, arXiv 2505.24298).

    Stale data is reweighted instead of being clipped away.
    """
    log_weight = _log_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
    weighing = _capped(log_weight, cap) if beyond == "cap" else _masked(log_weight, 0.0, cap)
    return _weighted_ppo(policy_logprobs, tokens, weighing, clip_low, clip_high)


def tis(policy_logprobs: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float, cap: float) -> TokenLoss:
    """``-min(B, cap) min(U A, clip(U) A)`` (truncated importance sampling, Ionides, JCGS 17(2), 2008)."""
    log_weight = _log_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
    return _weighted_ppo(policy_logprobs, tokens, _capped(log_weight, cap), clip_low, clip_high)


def mis(
    policy_logprobs: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float, lowest: float, highest: float
) -> TokenLoss:
    """``-B min(U A, clip(U) A)`` where B is within bounds, else 0 (IcePop, arXiv 2510.18855)."""
    log_weight = _log_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
    return _weighted_ppo(policy_logprobs, tokens, _masked(log_weight, lowest, highest), clip_low, clip_high)


def seq_tis(
    policy_logprobs: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float, cap: float, over: SequenceScope
) -> TokenLoss:
    """``tis`` with one B per sequence, the product or geometric mean of its tokens'."""
    weighing = _capped(_sequence_log_weight(tokens, over), cap)
    return _weighted_ppo(policy_logprobs, tokens, weighing, clip_low, clip_high)


def seq_mis(
    policy_logprobs: Tensor,
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    lowest: float,
    highest: float,
    over: SequenceScope,
) -> TokenLoss:
    """``mis`` with one B per sequence, the product or geometric mean of its tokens'."""
    weighing = _masked(_sequence_log_weight(tokens, over), lowest, highest)
    return _weighted_ppo(policy_logprobs, tokens, weighing, clip_low, clip_high)


def cispo(policy_logprobs: Tensor, tokens: Tokens, *, clip_high: float) -> TokenLoss:
    """``-sg(min(E, 1 + clip_high)) A log pi``: every token keeps a gradient (CISPO, arXiv 2506.13585)."""
    weight, cut = _capped(_log_ratio(policy_logprobs, tokens.behaviour_logprobs), 1 + clip_high)
    return TokenLoss(-weight * tokens.advantages * policy_logprobs, cut)


def gspo(policy_logprobs: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``-min(s A, clip(s) A)``, with s the geometric mean of a sequence's E (GSPO, arXiv 2507.18071).

    The sequence's loss is given to each of its tokens, so the mean over tokens weighs a sequence by its length.
    """
    gaps = policy_logprobs - tokens.behaviour_logprobs
    log_ratio = _over_sequences(gaps, tokens.lengths, "geometric_mean")
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss, cut = _surrogate(ratio, tokens.advantages, 1 - clip_low, 1 + clip_high)
    return TokenLoss(loss, cut | (log_ratio.detach().abs() > MAX_LOG_RATIO))


def m2po(policy_logprobs: Tensor, tokens: Tokens, *, tau: float) -> TokenLoss:
    """``-E A`` without clipping, of the tokens left when those of largest ``(log B)^2`` are dropped (arXiv 2510.01161).

    As many are dropped as it takes for the mean of the rest to be below ``tau``; of equal ones all or none.
    """
    squares = (tokens.proximal_logprobs.detach() - tokens.behaviour_logprobs).double().square()
    ordered = squares.sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # The running mean of ascending values never falls, so what is kept is what comes before the first excess.
    excess = ordered[means >= tau]
    dropped = squares >= excess.min() if len(excess) else torch.zeros_like(squares, dtype=torch.bool)
    ratio = _log_ratio(policy_logprobs, tokens.behaviour_logprobs).exp()
    loss = (-ratio * tokens.advantages).masked_fill(dropped, 0.0)
    return TokenLoss(loss, dropped | _beyond_reach(policy_logprobs, tokens.behaviour_logprobs))


def dis(policy_logprobs: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``-sg(E) A log pi`` where ``1 - clip_low < E < 1 + clip_high``, else 0.

    From Single-Rollout Asynchronous Optimization. Tokens that are masked still count in the mean.
    """
    weight = _log_ratio(policy_logprobs, tokens.behaviour_logprobs).detach().exp()
    outside = (weight <= 1 - clip_low) | (weight >= 1 + clip_high)
    return TokenLoss(-weight.masked_fill(outside, 0.0) * tokens.advantages * policy_logprobs, outside)


def sat(
    policy_logprobs: Tensor,
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    alpha: float,
    kernel: Literal["hill", "exponential", "step"],
    order: float,
) -> TokenLoss:
    """``ppo`` with a clip range that shrinks for outliers (Stale but Stable, arXiv 2607.18722).

    With ``d = log E`` and q the ``alpha`` quantile of ``|d|``, the clip width on the side of d is multiplied by a
    factor that is 1 up to q and falls beyond it. The shape of that kernel is not published; here, with
    ``x = (|d| - q) / q``: ``hill`` ``1 / (1 + x^order)``, ``exponential`` ``exp(-x)``, ``step`` 0. q is the smallest
    ``|d|`` that a share ``alpha`` of the tokens does not exceed.
    """
    gaps = (policy_logprobs - tokens.behaviour_logprobs).detach()
    distances = gaps.abs()
    if len(distances):
        # torch.quantile refuses more than 16 million values.
        quantile = distances.kthvalue(max(1, math.ceil(alpha * len(distances) - ROUNDING))).values
        excess = ((distances - quantile) / quantile.clamp(min=torch.finfo(gaps.dtype).tiny)).clamp(min=0.0)
    else:
        excess = distances
    if kernel == "hill":
        factor = 1 / (1 + excess**order)
    elif kernel == "exponential":
        factor = (-excess).exp()
    else:
        factor = (excess == 0).to(gaps.dtype)
    low = torch.where(gaps < 0, clip_low * factor, clip_low)
    high = torch.where(gaps > 0, clip_high * factor, clip_high)
    return _ppo(policy_logprobs, tokens.behaviour_logprobs, tokens.advantages, low, high)


def estr(
    policy_logprobs: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float, tau: float, epsilon: float
) -> TokenLoss:
    """``ppo`` where ``(log E)^2 / (H + epsilon) <= tau``, else 0 (Entropy-Normalized Trust Regions, arXiv 2607.22186).

    H is to be the behaviour policy's entropy. Engines do not report it, so the present policy's stands in for it.
    """
    gaps = (policy_logprobs - tokens.behaviour_logprobs).detach()
    distrusted = gaps.square() / (tokens.entropy + epsilon) > tau
    inner = _ppo(policy_logprobs, tokens.behaviour_logprobs, tokens.advantages, clip_low, clip_high)
    return TokenLoss(inner.loss.masked_fill(distrusted, 0.0), inner.cut | distrusted)


def divergence(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``exp(d) - 1 - d`` of each token, d the reference's logprob minus the policy's: what a token costs that strays.

    Its mean over the policy's own samples estimates KL(policy || reference), with little variance (k3; Schulman,
    Approximating KL Divergence, 2020; in GRPO, arXiv 2402.03300, eq. 4). Not a loss to choose; added to any.
    """
    gaps = (reference_logprobs - policy_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return gaps.exp() - 1 - gaps


# -- choice ----------------------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """A loss, and what must be known before it is called.

    ``uses_proximal``: it reads the proximal logprobs, which cost a forward pass once they differ from the policy's.
    ``whole_update``: it must see all tokens of an update at once.
    """

    function: LossFunction
    uses_proximal: bool = False
    whole_update: bool = False


LOSSES: dict[str, Loss] = {
    "ppo": Loss(ppo),
    "decoupled_ppo": Loss(decoupled_ppo, uses_proximal=True),
    "tis": Loss(tis, uses_proximal=True),
    "mis": Loss(mis, uses_proximal=True),
    "icepop": Loss(mis, uses_proximal=True),
    "seq_tis": Loss(seq_tis, uses_proximal=True),
    "seq_mis": Loss(seq_mis, uses_proximal=True),
    "cispo": Loss(cispo),
    "gspo": Loss(gspo),
    "m2po": Loss(m2po, uses_proximal=True, whole_update=True),
    "dis": Loss(dis),
    "sat": Loss(sat, whole_update=True),
    "estr": Loss(estr),
}


def resolve(settings: LossSettings) -> Loss:
    """The loss that the settings choose, its parameters bound. Of a user's own nothing is assumed."""
    if isinstance(settings, OwnLoss):
        if settings.folder not in sys.path:
            sys.path.append(settings.folder)
        function: LossFunction = pkgutil.resolve_name(settings.function)
        return Loss(partial(function, **settings.parameters), uses_proximal=True, whole_update=True)
    loss = LOSSES[name_of(settings)]
    return loss._replace(function=partial(loss.function, **msgspec.structs.asdict(settings)))
