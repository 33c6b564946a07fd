"""Policy losses for data sampled by older weights, as pure functions on plain tensors.

All arguments are float tensors of one shape, with one entry per sampled token; injected tokens and padding never get
here. Three policies appear: *behaviour* sampled the token, *proximal* is the trainer's policy at the start of the
step, *policy* is the one being differentiated. Ratios are formed from log differences held within
``+-MAX_LOG_RATIO``, so that no finite input gives an infinite loss.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_BEHAVIOUR_WEIGHT = 5.0


class TokenLoss(NamedTuple):
    """Per token: the loss, and whether clipping has cut off its gradient."""

    loss: Tensor
    clipped: Tensor


class Clip(NamedTuple):
    """Ratios are trusted within ``[1 - low, 1 + high]``."""

    low: float
    high: float


Loss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], TokenLoss]
"""``(policy_logprobs, proximal_logprobs, behaviour_logprobs, advantages, clip) -> TokenLoss``."""


def _ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    return (numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_surrogate(policy_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, clip: Clip) -> TokenLoss:
    ratio = _ratio(policy_logprobs, anchor_logprobs)
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    beyond_reach = (policy_logprobs - anchor_logprobs).abs() > MAX_LOG_RATIO
    return TokenLoss(-torch.minimum(free, bounded), (bounded < free) | beyond_reach)


def ppo(
    policy_logprobs: Tensor, proximal_logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip: Clip
) -> TokenLoss:
    """Clipped surrogate with the behaviour policy as the anchor (PPO, arXiv 1707.06347, eq. 7).

    ``min(E A, clip(E) A)`` with ``E = policy / behaviour``. The proximal logprobs are not used.
    """
    return _clipped_surrogate(policy_logprobs, behaviour_logprobs, advantages, clip)


def decoupled_ppo(
    policy_logprobs: Tensor, proximal_logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip: Clip
) -> TokenLoss:
    """Clipped surrogate around the proximal policy, weighted back to the behaviour policy (AReaL, arXiv 2505.24298).

    ``B min(U A, clip(U) A)`` with ``U = policy / proximal`` and ``B = proximal / behaviour``, detached and capped at
    ``MAX_BEHAVIOUR_WEIGHT``: stale data is reweighted instead of being clipped away.
    """
    proximal_logprobs = proximal_logprobs.detach()
    inner = _clipped_surrogate(policy_logprobs, proximal_logprobs, advantages, clip)
    weight = _ratio(proximal_logprobs, behaviour_logprobs).clamp(max=MAX_BEHAVIOUR_WEIGHT)
    return TokenLoss(weight * inner.loss, inner.clipped)


LOSSES: dict[str, Loss] = {"ppo": ppo, "decoupled_ppo": decoupled_ppo}


def group_advantages(rewards: Tensor, *, normalize: bool) -> Tensor:
    """Advantages of one group from its rewards, shape ``[members]`` (GRPO, arXiv 2402.03300, section 4.1.2).

    Reward minus the group's mean; divided by the group's standard deviation if ``normalize``. A group of equal
    rewards has advantage 0, exactly: rounding in its mean must not be scaled up to a signal.
    """
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(correction=0) + 1e-6) if normalize else centred
