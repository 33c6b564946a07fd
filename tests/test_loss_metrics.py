"""What the trainer measures of a step, on vectors small enough to count by hand."""

import math

import pytest

pytest.importorskip("torch")

import torch

from staleflow.trainer.loss_metrics import Measured, measure
from staleflow.trainer.losses import Tokens
from staleflow.types import CutShare, StepMetrics

pytestmark = pytest.mark.torch


def part(
    lengths: list[int],
    *,
    proximal: list[float] | None = None,
    policy: list[float] | None = None,
    cut: list[bool] | None = None,
    staleness: list[int] | None = None,
    known: bool = True,
) -> Measured:
    """Some sequences whose behaviour logprobs are all -1; proximal and policy are given as log ratios to them."""
    count = sum(lengths)
    behaviour = torch.full((count,), -1.0)
    return Measured(
        behaviour + torch.tensor(policy or [0.0] * count),
        Tokens(
            proximal_logprobs=behaviour + torch.tensor(proximal or [0.0] * count),
            behaviour_logprobs=behaviour,
            advantages=torch.ones(count),
            entropy=torch.arange(count).float(),
            lengths=torch.tensor(lengths),
        ),
        torch.tensor(cut or [False] * count),
        torch.tensor(staleness or [0] * count),
        known,
    )


def of(*parts: Measured) -> StepMetrics:
    return measure(parts, loss=1.0, gradient_norm=2.0, tokens=99)


def test_ratios_have_mean_second_moment_and_effective_share() -> None:
    metrics = of(part([4], proximal=[math.log(value) for value in (1, 1, 2, 4)], policy=[math.log(3)] * 4))
    assert metrics.behaviour_ratio.mean == pytest.approx(8 / 4)
    assert metrics.behaviour_ratio.second_moment == pytest.approx(22 / 4)
    assert metrics.behaviour_ratio.effective_share == pytest.approx(8 * 8 / (4 * 22))
    assert metrics.policy_ratio.mean == pytest.approx(3)
    assert metrics.policy_ratio.effective_share == pytest.approx(1)


def test_divergences_are_the_k1_and_k3_estimates_at_the_start_of_the_step() -> None:
    gaps = [0.5, -0.25, 0.0]
    metrics = of(part([3], proximal=gaps, policy=[9.0] * 3))
    assert metrics.k1 == pytest.approx(-sum(gaps) / 3)
    assert metrics.k3 == pytest.approx(sum(math.exp(d) - 1 - d for d in gaps) / 3)


def test_entropy_and_cut_are_means_over_tokens_of_all_parts() -> None:
    metrics = of(part([1], cut=[True]), part([2, 1], cut=[False, True, False]))
    assert metrics.entropy == pytest.approx((0 + 0 + 1 + 2) / 4)
    assert metrics.cut_share == pytest.approx(2 / 4)
    assert (metrics.measured_tokens, metrics.tokens, metrics.loss, metrics.gradient_norm) == (4, 99, 1.0, 2.0)


def test_V18_cut_by_staleness_weighs_tokens() -> None:
    metrics = of(
        part([3, 1], staleness=[2, 2, 0, 5], cut=[True, False, False, True]),
        part([2], staleness=[0, 0], cut=[True, False]),
    )
    assert metrics.cut_by_staleness == {
        0: CutShare(3, 1 / 3),
        2: CutShare(2, 0.5),
        5: CutShare(1, 1.0),
    }


def test_cut_by_length_has_tenths_of_trajectories_named_by_their_longest() -> None:
    lengths = list(range(1, 21))
    cut = [length > 18 for length in lengths for _ in range(length)]
    metrics = of(part(lengths, cut=cut))
    assert metrics.cut_by_length == {
        longest: CutShare(2 * longest - 1, 1.0 if longest == 20 else 0.0) for longest in range(2, 21, 2)
    }


def test_trajectories_of_one_length_are_never_divided() -> None:
    assert list(of(part([7] * 30)).cut_by_length) == [7]
    assert list(of(part([3] * 9 + [5])).cut_by_length) == [3, 5]
    assert list(of(part([4, 2])).cut_by_length) == [2, 4]


def test_parts_may_come_in_any_order() -> None:
    one, two = part([3, 1], policy=[0.1, 0.2, 0.3, 0.4], cut=[True, False, False, True]), part([2, 9])
    assert of(one, two) == of(two, one)


def test_parts_whose_proximal_policy_is_unknown_are_left_out_of_what_needs_it() -> None:
    known, unknown = part([2], proximal=[0.5, 0.5]), part([4], proximal=[3.0] * 4, policy=[1.0] * 4, known=False)
    metrics = of(known, unknown)
    assert metrics.behaviour_ratio == of(known).behaviour_ratio
    assert (metrics.k1, metrics.k3) == (of(known).k1, of(known).k3)
    assert metrics.policy_ratio.mean == pytest.approx((2 + 4 * math.e) / 6)
    assert metrics.agreement == of(known).agreement


def test_nothing_is_said_of_the_start_of_the_step_where_nothing_was_measured_at_it() -> None:
    metrics = of(part([2], policy=[1.0, 1.0], known=False))
    assert metrics.policy_ratio.mean == pytest.approx(math.e)
    assert (metrics.k1, metrics.k3, metrics.behaviour_ratio.mean, metrics.agreement) == (0.0, 0.0, 0.0, None)


def test_nothing_measured_is_nothing_said() -> None:
    assert of() == StepMetrics(1.0, 2.0, 99)


def test_extreme_ratios_stay_finite() -> None:
    metrics = of(part([2], proximal=[50.0, -50.0], policy=[-50.0, 50.0]))
    for ratio in (metrics.behaviour_ratio, metrics.policy_ratio):
        assert all(map(math.isfinite, (ratio.mean, ratio.second_moment, ratio.effective_share)))
    assert math.isfinite(metrics.k3)


def test_agreement_is_of_trajectories_that_are_fresh_throughout() -> None:
    metrics = of(
        part([2, 2], proximal=[0.1, 0.1, 5.0, 5.0], staleness=[0, 0, 1, 0]), part([1], proximal=[0.1], staleness=[0])
    )
    assert metrics.agreement is not None
    assert metrics.agreement.tokens == 3
    assert metrics.agreement.gap_mean == pytest.approx(0.1)
    assert metrics.agreement.ratio_mean == pytest.approx(math.exp(0.1))
    assert of(part([2], staleness=[1, 0])).agreement is None
