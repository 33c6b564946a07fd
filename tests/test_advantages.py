"""Advantages and aggregation, against references written out member by member."""

import math
import statistics
from typing import Any, get_args

import pytest

pytest.importorskip("torch")

import torch

from staleflow.trainer.advantages import advantages, gae
from staleflow.trainer.aggregation import token_shares
from staleflow.trainer.loss_settings import AdvantageKind, AggregationKind

pytestmark = pytest.mark.torch

GROUPS = [[0.0, 0.0, 1.0, 3.0], [2.0, -1.0], [0.5, 0.5, 0.5], [4.0]]


def of(kind: AdvantageKind, groups: list[list[float]] = GROUPS) -> list[list[float]]:
    result = advantages([torch.tensor(group, dtype=torch.float64) for group in groups], kind)
    return [part.tolist() for part in result.split([len(group) for group in groups])]


def close(result: list[list[float]], expected: list[list[float]]) -> bool:
    return all(one == pytest.approx(other, rel=1e-5, abs=1e-9) for one, other in zip(result, expected, strict=True))


def test_group_advantage_is_relative_to_the_group() -> None:
    assert close(of("group"), [[reward - statistics.fmean(group) for reward in group] for group in GROUPS])


def test_normalized_group_advantage_is_in_units_of_the_deviation() -> None:
    expected = [
        [(reward - statistics.fmean(group)) / (statistics.pstdev(group) or 1.0) for reward in group] for group in GROUPS
    ]
    assert close(of("group_normalized"), expected)


def test_leave_one_out_compares_with_the_others() -> None:
    expected = []
    for group in GROUPS:
        others = [[*group[:index], *group[index + 1 :]] for index in range(len(group))]
        expected.append(
            [reward - statistics.fmean(rest or [reward]) for reward, rest in zip(group, others, strict=True)]
        )
    assert close(of("leave_one_out"), expected)


def test_batch_advantage_compares_across_groups_even_of_one_member() -> None:
    rewards = [reward for group in GROUPS for reward in group]
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert close(of("batch_normalized"), [[(reward - mean) / deviation for reward in group] for group in GROUPS])
    assert of("batch_normalized")[-1] != [0.0]


def test_constant_advantage_is_one() -> None:
    assert of("constant") == [[1.0] * len(group) for group in GROUPS]


@pytest.mark.parametrize("kind", ["group", "group_normalized", "leave_one_out", "batch_normalized"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1 / 3] * 3, [1e9] * 5, [0.5]])
def test_equal_rewards_have_no_advantage(rewards: list[float], kind: Any) -> None:
    assert of(kind, [rewards]) == [[0.0] * len(rewards)]


# -- generalized advantage estimation ----------------------------------------------------------------------------------


def slow_gae(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """The sum that defines it, over a trajectory of actions only."""
    after = [*values[1:], 0.0]
    surprises = [
        reward + discount * following - value for reward, value, following in zip(rewards, values, after, strict=True)
    ]
    return [
        math.fsum((discount * decay) ** later * surprise for later, surprise in enumerate(surprises[start:]))
        for start in range(len(surprises))
    ]


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (0.9, 0.5), (1.0, 0.0)])
def test_gae_steps_over_observations(discount: float, decay: float) -> None:
    random = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 12, generator=random, dtype=torch.float64)
    sampled = torch.tensor([0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
    result = gae(rewards, values, sampled, discount=discount, decay=decay)
    expected = slow_gae(rewards[sampled].tolist(), values[sampled].tolist(), discount, decay)
    assert result[sampled].tolist() == pytest.approx(expected)
    assert not result[~sampled].any()
    elsewhere = gae(rewards + 9.0 * ~sampled, values - 9.0 * ~sampled, sampled, discount=discount, decay=decay)
    assert elsewhere.equal(result), "what observations are worth plays no part"


def test_gae_of_no_action_is_nothing() -> None:
    nothing = torch.zeros(3)
    assert gae(nothing + 1, nothing + 2, nothing.bool(), discount=0.9, decay=0.9).tolist() == [0.0] * 3


# -- aggregation -------------------------------------------------------------------------------------------------------


def test_shares_give_the_means_they_are_named_after() -> None:
    losses = [[1.0, 2.0, 3.0], [10.0], [5.0, 7.0]]
    lengths = torch.tensor([len(each) for each in losses])
    expected: dict[AggregationKind, float] = {
        "token_mean": statistics.fmean(value for each in losses for value in each),
        "sequence_mean": statistics.fmean(statistics.fmean(each) for each in losses),
        "sequence_sum": statistics.fmean(sum(each) / 8 for each in losses),
    }
    assert set(expected) == set(get_args(AggregationKind))
    for kind, value in expected.items():
        shares = token_shares(lengths, kind, 8).tolist()
        total = sum(share * sum(each) for share, each in zip(shares, losses, strict=True))
        assert total == pytest.approx(value), kind
