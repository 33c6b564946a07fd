"""Advantages: how much better a trajectory did than was to be expected.

From the rewards of a batch, group by group, to one number per trajectory. A group can have a single member, if it was
closed short; with nothing to compare it to, its advantage is 0 unless the whole batch is compared. Where all rewards
that are compared are equal, advantages are 0, exactly: rounding in a mean must not be scaled up to a signal.
"""

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from staleflow.trainer.loss_settings import AdvantageKind

EPSILON = 1e-6


def advantages(groups: Sequence[Tensor], kind: AdvantageKind) -> Tensor:
    """Advantage of every trajectory, ``[trajectories]``, from the rewards of each group, ``[members]`` each."""
    rewards = torch.cat(list(groups))
    match kind:
        case "group_normalized":
            return torch.cat([_normalized(group) for group in groups])
        case "group":
            return torch.cat([_centred(group) for group in groups])
        case "leave_one_out":
            return torch.cat([leave_one_out(group) for group in groups])
        case "batch_normalized":
            return _normalized(rewards)
        case "constant":
            return torch.ones_like(rewards)
        case _:
            assert_never(kind)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the *other* members' (RLOO, arXiv 2402.14740, eq. 7); 0 for a member without others."""
    return _centred(rewards) * (len(rewards) / max(len(rewards) - 1, 1))


def gae(rewards: Tensor, values: Tensor, sampled: Tensor, *, discount: float, decay: float) -> Tensor:
    """Generalized advantage estimates of one trajectory, all ``[tokens]`` (arXiv 1506.02438, eq. 16).

    Observation tokens are no actions: they are stepped over, so that the last token of one action is followed by the
    first of the next. Their rewards and values are not looked at and their advantage is 0. The trajectory ends with
    its last token, so nothing is expected after it. The trainer has no value model; this is for a loss that has one.
    """
    result = torch.zeros_like(values)
    following_value = following_advantage = values.new_zeros(())
    for index in reversed(sampled.nonzero()[:, 0].tolist()):
        surprise = rewards[index] + discount * following_value - values[index]
        result[index] = following_advantage = surprise + discount * decay * following_advantage
        following_value = values[index]
    return result


def _centred(rewards: Tensor) -> Tensor:
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def _normalized(rewards: Tensor) -> Tensor:
    return _centred(rewards) / (rewards.std(correction=0) + EPSILON)
