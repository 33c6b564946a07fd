"""The losses, against slow references written from the formulas, finite differences and their own special cases."""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

pytest.importorskip("torch")

import torch

from staleflow.trainer.loss_settings import BY_NAME, loss_settings
from staleflow.trainer.losses import LOSSES, Loss, TokenLoss, Tokens, resolve

pytestmark = pytest.mark.torch

Vector = torch.Tensor
LENGTHS = [4, 1, 9, 2, 14, 3]
EVERY = pytest.mark.parametrize("name", sorted(LOSSES))


def vector(*values: float) -> Vector:
    return torch.tensor(values, dtype=torch.float64)


def make(name: str, **parameters: Any) -> Loss:
    return resolve(loss_settings(name, parameters))


def tokens(
    proximal: Vector,
    behaviour: Vector,
    advantages: Vector,
    *,
    entropy: Vector | None = None,
    lengths: list[int] | None = None,
) -> Tokens:
    """One sequence, unless ``lengths`` says otherwise."""
    return Tokens(
        proximal,
        behaviour,
        advantages,
        torch.ones_like(behaviour) if entropy is None else entropy,
        torch.tensor([len(behaviour)] if lengths is None else lengths, dtype=torch.int64),
    )


def scattered(seed: int, lengths: list[int], spread: float = 0.3) -> tuple[Vector, Tokens]:
    """Policies around one another, with advantages of both signs and a sequence that has none."""
    random = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    behaviour = -torch.rand(count, generator=random, dtype=torch.float64) * 3 - 0.1
    proximal, policy = (
        behaviour + spread * torch.randn(count, generator=random, dtype=torch.float64) for _ in range(2)
    )
    advantages = torch.randn(len(lengths), generator=random, dtype=torch.float64)
    advantages[-1] = 0.0
    entropy = torch.rand(count, generator=random, dtype=torch.float64) * 2
    spread_out = advantages.repeat_interleave(torch.tensor(lengths))
    return policy, tokens(proximal, behaviour, spread_out, entropy=entropy, lengths=lengths)


def gradient(loss: Loss, policy: Vector, given: Tokens) -> tuple[TokenLoss, Vector]:
    policy = policy.detach().clone().requires_grad_()
    result = loss.function(policy, given)
    [slopes] = torch.autograd.grad(result.loss.sum(), policy)
    return result, slopes


# -- slow references: one token at a time, in floats -----------------------------------------------------------------


class Token:
    """One token, its ratios, and the log ratios of its sequence and of its update."""

    def __init__(self, policy: Vector, given: Tokens, index: int) -> None:
        self.policy, self.mu, self.q, self.advantage, self.entropy = (
            values[index].item()
            for values in (policy, given.behaviour_logprobs, given.proximal_logprobs, given.advantages, given.entropy)
        )
        self.b, self.e = math.exp(self.q - self.mu), math.exp(self.policy - self.mu)
        self.update_b = (given.proximal_logprobs - given.behaviour_logprobs).tolist()
        self.update_e = (policy - given.behaviour_logprobs).tolist()
        ends = [0, *given.lengths.cumsum(0).tolist()]
        start, end = next((one, other) for one, other in itertools.pairwise(ends) if one <= index < other)
        self.sequence_b, self.sequence_e = self.update_b[start:end], self.update_e[start:end]


Reference: TypeAlias = Callable[[Token], Callable[[float], float]]
"""From a token to its loss as a function of its logprob, with weights and masks held where the token has them."""


def clipped(ratio: float, advantage: float, low: float = 0.8, high: float = 1.2) -> float:
    return -min(ratio * advantage, max(low, min(high, ratio)) * advantage)


def ppo_of_e(token: Token, keep: bool = True, low: float = 0.8, high: float = 1.2) -> Callable[[float], float]:
    return lambda policy: keep * clipped(math.exp(policy - token.mu), token.advantage, low, high)


def ppo_of_u(token: Token, weight: float) -> Callable[[float], float]:
    return lambda policy: weight * clipped(math.exp(policy - token.q), token.advantage)


def policy_gradient(token: Token, weight: float) -> Callable[[float], float]:
    return lambda policy: -weight * token.advantage * policy


def inside(value: float, low: float, high: float) -> float:
    return value if low <= value <= high else 0.0


def gspo(token: Token) -> Callable[[float], float]:
    rest, count = sum(token.sequence_e) - (token.policy - token.mu), len(token.sequence_e)

    def loss(policy: float) -> float:
        return clipped(math.exp((rest + policy - token.mu) / count), token.advantage, 1 - 3e-4, 1 + 4e-4)

    return loss


def sat(token: Token) -> Callable[[float], float]:
    d = token.policy - token.mu
    distances = sorted(map(abs, token.update_e))
    quantile = next(q for q in distances if sum(x <= q for x in distances) >= 0.9 * len(distances))
    factor = 1.0 if abs(d) <= quantile else 1 / (1 + ((abs(d) - quantile) / quantile) ** 2)
    low, high = (0.2, 0.2 * factor) if d > 0 else (0.2 * factor, 0.2)
    return ppo_of_e(token, low=1 - low, high=1 + high)


def m2po(token: Token) -> Callable[[float], float]:
    rest = [x * x for x in token.update_b]
    while rest and sum(rest) / len(rest) >= 0.04:
        rest.remove(max(rest))
    kept = bool(rest) and (token.q - token.mu) ** 2 <= max(rest) + 1e-12
    return lambda policy: -kept * math.exp(policy - token.mu) * token.advantage


REFERENCES: dict[str, Reference] = {
    "ppo": ppo_of_e,
    "decoupled_ppo": lambda t: ppo_of_u(t, min(t.b, 5.0)),
    "tis": lambda t: ppo_of_u(t, min(t.b, 2.0)),
    "mis": lambda t: ppo_of_u(t, inside(t.b, 0.5, 5.0)),
    "icepop": lambda t: ppo_of_u(t, inside(t.b, 0.5, 5.0)),
    "seq_tis": lambda t: ppo_of_u(t, min(math.prod(map(math.exp, t.sequence_b)), 2.0)),
    "seq_mis": lambda t: ppo_of_u(t, inside(math.prod(map(math.exp, t.sequence_b)), 0.5, 5.0)),
    "cispo": lambda t: policy_gradient(t, min(t.e, 5.0)),
    "gspo": gspo,
    "m2po": m2po,
    "dis": lambda t: policy_gradient(t, t.e if 0.7 < t.e < 6.0 else 0.0),
    "sat": sat,
    "estr": lambda t: ppo_of_e(t, keep=math.log(t.e) ** 2 / (t.entropy + 0.01) <= 0.04),
}


@EVERY
@pytest.mark.parametrize("spread", [0.05, 0.3, 1.5])
def test_loss_is_what_its_formula_says(name: str, spread: float) -> None:
    policy, given = scattered(3, LENGTHS, spread)
    each = [Token(policy, given, index) for index in range(len(policy))]
    expected = vector(*(REFERENCES[name](token)(token.policy) for token in each))
    torch.testing.assert_close(make(name).function(policy, given).loss, expected)


@EVERY
@pytest.mark.parametrize("spread", [0.05, 0.3, 1.5])
def test_gradient_is_the_finite_difference_of_its_formula(name: str, spread: float) -> None:
    policy, given = scattered(0, LENGTHS, spread)
    _, slopes = gradient(make(name), policy, given)
    for index, slope in enumerate(slopes.tolist()):
        token = Token(policy, given, index)
        loss, step = REFERENCES[name](token), 1e-6
        difference = (loss(token.policy + step) - loss(token.policy - step)) / (2 * step)
        if name == "gspo":
            # The loss of every other token of the sequence moves with it.
            difference *= len(token.sequence_e)
        assert slope == pytest.approx(difference, rel=1e-6, abs=1e-8)


# -- what all of them have in common ----------------------------------------------------------------------------------


@EVERY
def test_equal_policies_give_the_vanilla_policy_gradient(name: str) -> None:
    _, given = scattered(1, [3, 1, 5, 2])
    given = given._replace(proximal_logprobs=given.behaviour_logprobs)
    result, slopes = gradient(make(name), given.behaviour_logprobs, given)
    torch.testing.assert_close(slopes, -given.advantages)
    assert not result.cut.any()


@EVERY
def test_weights_and_masks_are_constants(name: str) -> None:
    """No gradient leaves through the proximal policy, though it be the policy itself."""
    policy, given = scattered(5, [4, 1, 9, 2])
    loss = make(name)
    policy.requires_grad_()
    [apart] = torch.autograd.grad(
        loss.function(policy, given._replace(proximal_logprobs=policy.detach())).loss.sum(), policy
    )
    [joined] = torch.autograd.grad(loss.function(policy, given._replace(proximal_logprobs=policy)).loss.sum(), policy)
    torch.testing.assert_close(joined, apart, rtol=0, atol=0)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [50.0, -50.0])
def test_extreme_ratios_give_finite_loss_and_gradient(
    name: str, distance: float, advantage: float, dtype: torch.dtype
) -> None:
    near, far = torch.tensor([-60.0, -60.0], dtype=dtype), torch.tensor([-60.0 + distance, -60.0], dtype=dtype)
    advantages = torch.full_like(near, advantage)
    for policy, proximal, behaviour in ((far, near, near), (far, far, near), (near, near, far), (near, far, far)):
        result, slopes = gradient(make(name), policy, tokens(proximal, behaviour, advantages, lengths=[1, 1]))
        assert torch.isfinite(result.loss).all()
        assert torch.isfinite(slopes).all()
        assert result.cut[slopes == 0].all(), "a lost gradient is reported as cut"


@EVERY
def test_order_of_sequences_does_not_matter(name: str) -> None:
    policy, given = scattered(7, LENGTHS)
    order = [3, 5, 0, 4, 2, 1]
    spans = torch.arange(len(policy)).split(LENGTHS)
    places = torch.cat([spans[index] for index in order])
    permuted = Tokens(
        given.proximal_logprobs[places],
        given.behaviour_logprobs[places],
        given.advantages[places],
        given.entropy[places],
        given.lengths[order],
    )
    result, slopes = gradient(make(name), policy, given)
    other, other_slopes = gradient(make(name), policy[places], permuted)
    torch.testing.assert_close(other.loss, result.loss[places])
    torch.testing.assert_close(other_slopes, slopes[places])
    assert other.cut.equal(result.cut[places])


@pytest.mark.parametrize("name", sorted(name for name, loss in LOSSES.items() if not loss.whole_update))
def test_loss_that_may_be_called_on_parts_gives_the_same_there(name: str) -> None:
    lengths = [4, 1, 9, 2]
    policy, given = scattered(9, lengths)
    loss = make(name)
    whole = loss.function(policy, given)
    columns = zip(*(value.split(lengths) for value in (policy, *given[:-1], *whole)), strict=True)
    for logprobs, proximal, behaviour, advantages, entropy, expected, cut in columns:
        part = loss.function(logprobs, tokens(proximal, behaviour, advantages, entropy=entropy))
        torch.testing.assert_close(part.loss, expected)
        assert part.cut.equal(cut)


@pytest.mark.parametrize("name", sorted(name for name, loss in LOSSES.items() if not loss.whole_update))
def test_loss_that_may_be_called_on_parts_needs_no_tokens_without_advantage(name: str) -> None:
    policy, given = scattered(9, [4, 1, 9, 2])
    result, slopes = gradient(make(name), policy, given)
    assert not result.loss[given.advantages == 0].any()
    assert not slopes[given.advantages == 0].any()


@EVERY
def test_proximal_policy_matters_to_the_losses_that_say_so(name: str) -> None:
    policy, given = scattered(11, [6, 6, 6], spread=0.6)
    loss = make(name)
    other = loss.function(policy, given._replace(proximal_logprobs=given.proximal_logprobs + 1.0))
    assert loss.function(policy, given).loss.equal(other.loss) is not loss.uses_proximal


@EVERY
def test_no_tokens_are_no_error(name: str) -> None:
    nothing = vector()
    result, slopes = gradient(make(name), nothing, tokens(nothing, nothing, nothing, lengths=[]))
    assert len(result.loss) == len(result.cut) == len(slopes) == 0


@EVERY
def test_sequence_without_tokens_is_no_error(name: str) -> None:
    policy, given = scattered(13, [3, 2])
    result = make(name).function(policy, given)
    other = make(name).function(policy, given._replace(lengths=torch.tensor([0, 3, 0, 2, 0])))
    torch.testing.assert_close(other.loss, result.loss)


@EVERY
def test_parameters_of_a_loss_are_the_fields_of_its_record(name: str) -> None:
    signature = inspect.signature(LOSSES[name].function)
    keywords = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(keywords) == sorted(BY_NAME[name].__struct_fields__)


# -- special cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [
        (1.5, 1.0, True),
        (1.5, -1.0, False),
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (1.27, 1.0, False),
        (0.81, -1.0, False),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "tis", "mis", "seq_mis", "seq_tis", "gspo"])
def test_clipping_stops_only_the_move_away(name: str, ratio: float, advantage: float, cut: bool) -> None:
    anchor = vector(-3.0)
    given = tokens(anchor, anchor, vector(advantage))
    result, slopes = gradient(make(name, clip_low=0.2, clip_high=0.28), anchor + math.log(ratio), given)
    assert bool(result.cut) is cut
    assert slopes.item() == pytest.approx(0.0 if cut else -ratio * advantage)


SAME: list[tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = [
    (("decoupled_ppo", {"cap": 2.0}), ("tis", {})),
    (("decoupled_ppo", {"beyond": "mask"}), ("mis", {"lowest": 1e-9})),
    (("mis", {}), ("icepop", {})),
    (("sat", {"alpha": 1.0}), ("ppo", {})),
    (("estr", {"tau": 1e9}), ("ppo", {})),
    (("dis", {"clip_low": 1.0, "clip_high": 1e9}), ("cispo", {"clip_high": 1e9})),
    (("m2po", {"tau": 1e9}), ("ppo", {"clip_low": 1.0, "clip_high": 1e9})),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=lambda pair: pair[0])
def test_losses_meet_where_their_formulas_do(
    one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]
) -> None:
    policy, given = scattered(15, [4, 1, 9, 2], spread=1.0)
    (name, parameters), (other_name, other_parameters) = one, other
    ours, slopes = gradient(make(name, **parameters), policy, given)
    theirs, other_slopes = gradient(make(other_name, **other_parameters), policy, given)
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(slopes, other_slopes)


@pytest.mark.parametrize(("sequence", "token"), [("seq_tis", "tis"), ("seq_mis", "mis"), ("gspo", "ppo")])
def test_sequences_of_one_token_are_tokens(sequence: str, token: str) -> None:
    policy, given = scattered(17, [1] * 20)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    ours, slopes = gradient(make(sequence, **clip), policy, given)
    theirs, other_slopes = gradient(make(token, **clip), policy, given)
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(slopes, other_slopes)


@pytest.mark.parametrize("name", ["seq_tis", "seq_mis"])
def test_geometric_mean_does_not_grow_with_length(name: str) -> None:
    behaviour = vector(*[-1.0] * 60)
    given = tokens(behaviour + math.log(1.5), behaviour, torch.ones_like(behaviour), lengths=[10, 50])
    mean = make(name, over="geometric_mean").function(given.proximal_logprobs, given)
    torch.testing.assert_close(mean.loss, torch.full_like(behaviour, -1.5))
    assert not mean.cut.any()
    assert make(name, over="product").function(given.proximal_logprobs, given).cut.all()


def test_m2po_drops_all_of_equal_outliers_and_can_drop_everything() -> None:
    behaviour = vector(-1.0, -1.0, -1.0, -1.0)
    given = tokens(behaviour + vector(0.1, -0.3, 0.3, 0.0), behaviour, torch.ones_like(behaviour))
    loss = make("m2po")
    # One of the two could stay below the threshold, but which one would be up to the order of tokens.
    assert loss.function(behaviour, given).cut.tolist() == [False, True, True, False]
    result, slopes = gradient(loss, behaviour, given._replace(proximal_logprobs=behaviour + 1.0))
    assert result.cut.all()
    assert not slopes.any()


@pytest.mark.parametrize(("kernel", "factor"), [("hill", 1 / 2), ("exponential", math.exp(-1)), ("step", 0.0)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sat_narrows_the_side_an_outlier_is_on(kernel: str, factor: float, sign: float) -> None:
    behaviour = torch.full((10,), -1.0, dtype=torch.float64)
    gaps = vector(*[0.1 * sign] * 9, 0.2 * sign)
    given = tokens(behaviour, behaviour, torch.full_like(behaviour, sign))
    result = make("sat", kernel=kernel, clip_low=0.15, clip_high=0.15).function(behaviour + gaps, given)
    assert result.cut.tolist() == [False] * 9 + [True]
    assert result.loss[-1].item() == pytest.approx(-sign * (1 + sign * 0.15 * factor))


def test_sat_of_equal_policies_with_one_outlier() -> None:
    """The quantile is 0: beyond it nothing is trusted."""
    behaviour = torch.full((10,), -1.0, dtype=torch.float64)
    policy = behaviour + vector(*[0.0] * 9, 0.1)
    result, slopes = gradient(make("sat"), policy, tokens(behaviour, behaviour, torch.ones_like(behaviour)))
    assert result.cut.tolist() == [False] * 9 + [True]
    torch.testing.assert_close(slopes, vector(*[-1.0] * 9, 0.0))


def test_estr_trusts_less_where_the_policy_was_sure() -> None:
    behaviour = vector(-1.0, -1.0)
    given = tokens(behaviour, behaviour, vector(1.0, 1.0), entropy=vector(0.0, 1.0))
    result, slopes = gradient(make("estr"), behaviour + 0.1, given)
    assert result.cut.tolist() == [True, False]
    assert slopes[0] == 0
    assert slopes[1] != 0


def test_cispo_keeps_a_gradient_on_every_token() -> None:
    policy, given = scattered(19, [10, 10, 1], spread=3.0)
    result, slopes = gradient(make("cispo"), policy, given)
    assert result.cut.any()
    assert (slopes[given.advantages != 0] != 0).all()
