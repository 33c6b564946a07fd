"""The losses, against formulas and finite differences."""

import math

import pytest

pytest.importorskip("torch")

import torch

from staleflow.trainer.losses import (
    LOSSES,
    MAX_BEHAVIOUR_WEIGHT,
    Clip,
    decoupled_ppo,
    group_advantages,
    ppo,
)

pytestmark = pytest.mark.torch

CLIP = Clip(0.2, 0.28)
BOTH = pytest.mark.parametrize("name", sorted(LOSSES))


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@BOTH
def test_equal_policies_give_the_vanilla_policy_gradient(name: str) -> None:
    behaviour, advantages = vector(-0.5, -2.0, -7.0), vector(1.5, -0.3, 0.0)
    policy = behaviour.clone().requires_grad_()
    result = LOSSES[name](policy, behaviour, behaviour, advantages, CLIP)
    result.loss.sum().backward()
    torch.testing.assert_close(policy.grad, -advantages)
    torch.testing.assert_close(result.loss.detach(), -advantages)
    assert not result.clipped.any()


@BOTH
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    behaviour, proximal, policy, advantages = torch.randn(4, 64, generator=random, dtype=torch.float64)
    behaviour, proximal, policy = -behaviour.abs(), -proximal.abs(), -policy.abs()
    policy.requires_grad_()

    def loss(policy: torch.Tensor) -> torch.Tensor:
        return LOSSES[name](policy, proximal, behaviour, advantages, CLIP).loss

    assert torch.autograd.gradcheck(loss, (policy,))


@BOTH
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [50.0, -50.0])
def test_extreme_ratios_give_finite_loss_and_gradient(name: str, distance: float, advantage: float) -> None:
    policy = torch.tensor([-60.0 + distance], requires_grad=True)
    far = torch.tensor([-60.0])
    for proximal, behaviour in ((far, far), (policy.detach(), far), (far, policy.detach())):
        policy.grad = None
        result = LOSSES[name](policy, proximal, behaviour, torch.tensor([advantage]), CLIP)
        result.loss.sum().backward()
        assert torch.isfinite(result.loss).all()
        assert policy.grad is not None
        assert torch.isfinite(policy.grad).all()
        cut_off = bool(policy.grad.abs().max() == 0)
        assert cut_off <= bool(result.clipped.all()), "a lost gradient is reported as clipped"


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.5, 1.0, True),
        (1.5, -1.0, False),
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (1.27, 1.0, False),
        (0.81, -1.0, False),
    ],
)
@BOTH
def test_clipping_stops_only_the_move_away(name: str, ratio: float, advantage: float, clipped: bool) -> None:
    anchor = vector(-3.0)
    policy = vector(-3.0 + math.log(ratio)).requires_grad_()
    result = LOSSES[name](policy, anchor, anchor, vector(advantage), CLIP)
    result.loss.sum().backward()
    assert bool(result.clipped) is clipped
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_ppo_does_not_look_at_the_proximal_policy() -> None:
    policy, behaviour, advantages = vector(-1.0, -2.0), vector(-1.1, -2.2), vector(1.0, -1.0)
    one = ppo(policy, vector(0.0, 0.0), behaviour, advantages, CLIP)
    other = ppo(policy, vector(-9.0, -9.0), behaviour, advantages, CLIP)
    torch.testing.assert_close(one.loss, other.loss)


def test_decoupled_weight_is_detached_and_capped() -> None:
    behaviour, advantages = vector(-4.0, -4.0), vector(1.0, 1.0)
    policy = vector(-3.0, -1.0).requires_grad_()
    # The proximal policy is the policy itself, undetached: no gradient may pass through the weight.
    result = decoupled_ppo(policy, policy, behaviour, advantages, CLIP)
    result.loss.sum().backward()
    weights = vector(math.exp(1.0), MAX_BEHAVIOUR_WEIGHT)
    torch.testing.assert_close(policy.grad, -weights)
    torch.testing.assert_close(result.loss.detach(), -weights)


def test_advantages_are_relative_to_the_group() -> None:
    rewards = vector(0.0, 0.0, 1.0, 3.0)
    torch.testing.assert_close(group_advantages(rewards, normalize=False), vector(-1.0, -1.0, 0.0, 2.0))
    deviation = math.sqrt((1 + 1 + 0 + 4) / 4)
    expected = vector(-1.0, -1.0, 0.0, 2.0) / deviation
    torch.testing.assert_close(group_advantages(rewards, normalize=True), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1 / 3] * 3, [1e9] * 5, [0.5]])
def test_equal_rewards_have_no_advantage(rewards: list[float], normalize: bool) -> None:
    assert group_advantages(torch.tensor(rewards), normalize=normalize).tolist() == [0.0] * len(rewards)
