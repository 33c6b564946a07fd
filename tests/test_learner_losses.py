"""Every loss in the learner: what the model gets of it must not depend on how its tokens were passed through."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from models import ALPHABET, batch, figures, injected, load, make_learner, plain_logprobs, sampled, trajectory

from staleflow import LocalTrainer
from staleflow.errors import ConfigError, TrainerError
from staleflow.testing import character_llama
from staleflow.trainer import learner as learner_module
from staleflow.trainer.agreement import disagreement
from staleflow.trainer.learner import Learner
from staleflow.trainer.losses import LOSSES, TokenLoss, Tokens, ppo
from staleflow.trainer.sequences import Sequences, collate
from staleflow.types import TrainBatch

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

EVERY = pytest.mark.parametrize("name", sorted(LOSSES))
# These act on a bounded part of the batch; by default they would leave nothing of data as far off as this.
WIDE: dict[str, dict[str, float]] = {"gspo": {"clip_low": 0.2, "clip_high": 0.2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_llama(tmp_path_factory.mktemp("model"), ALPHABET, hidden_size=32)


def own_ppo(policy_logprobs: torch.Tensor, tokens: Tokens, *, width: float) -> TokenLoss:
    return ppo(policy_logprobs, tokens, clip_low=width, clip_high=width)


def no_vector(policy_logprobs: torch.Tensor, tokens: Tokens) -> TokenLoss:
    return TokenLoss(policy_logprobs.sum(), policy_logprobs > 0)


def trained(learner: Learner, data: TrainBatch) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics of a step, and the gradient of its last update."""
    metrics = figures(learner.step(data))
    return metrics, torch.cat([value.grad.flatten() for value in learner._model.parameters()])


def assert_same(one: tuple[dict[str, float], torch.Tensor], other: tuple[dict[str, float], torch.Tensor]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-5 * float(other[1].abs().max()))


@EVERY
@pytest.mark.parametrize("minibatches", [1, 2])
def test_packing_does_not_matter(model: Path, name: str, minibatches: int) -> None:
    def of(micro_batch_tokens: int) -> Any:
        settings = {"loss": name, "loss_parameters": WIDE.get(name), "minibatches": minibatches}
        return trained(make_learner(model, micro_batch_tokens=micro_batch_tokens, **settings), batch())

    expected = of(10_000)
    assert expected[1].abs().max() > 0
    for micro_batch_tokens in (1, 40):
        assert_same(of(micro_batch_tokens), expected)


@EVERY
def test_order_of_rows_does_not_matter(model: Path, name: str) -> None:
    settings = {"loss": name, "loss_parameters": WIDE.get(name)}
    data = batch()
    expected = trained(make_learner(model, micro_batch_tokens=40, **settings), data)
    shuffled = TrainBatch(0, [group[::-1] for group in (data.groups[index] for index in (2, 0, 3, 1))])
    assert_same(trained(make_learner(model, micro_batch_tokens=30, **settings), shuffled), expected)


@EVERY
def test_padding_does_not_matter(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"loss": name, "loss_parameters": WIDE.get(name)}
    expected = trained(make_learner(model, **settings), batch())

    def padded(data: TrainBatch, kind: Any) -> Sequences:
        one = collate(data, kind)
        pad = torch.nn.functional.pad
        return one._replace(
            inputs=pad(one.inputs, (0, 9), value=5),
            targets=pad(one.targets, (0, 9), value=5),
            sampled=pad(one.sampled, (0, 9)),
            behaviour_logprobs=pad(one.behaviour_logprobs, (0, 9), value=-30.0),
            staleness=pad(one.staleness, (0, 9), value=100),
            lengths=one.lengths + 9,
        )

    monkeypatch.setattr(learner_module, "collate", padded)
    assert_same(trained(make_learner(model, **settings), batch()), expected)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_loss_of_all_tokens_at_once_has_the_same_gradient(model: Path, minibatches: int) -> None:
    """The same formula on the other path through the learner, given as the user's own."""
    built_in = make_learner(model, loss="ppo", minibatches=minibatches, micro_batch_tokens=40, learning_rate=0.01)
    own = make_learner(
        model,
        loss=own_ppo,
        loss_parameters={"width": 0.2},
        minibatches=minibatches,
        micro_batch_tokens=40,
        learning_rate=0.01,
    )
    expected, result = trained(built_in, batch()), trained(own, batch())
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-5 * float(expected[1].abs().max()))
    assert result[0][".loss"] == pytest.approx(expected[0][".loss"], rel=1e-5)
    assert result[0][".gradient_norm"] == pytest.approx(expected[0][".gradient_norm"], rel=1e-5)


def test_own_loss_that_does_not_return_vectors_is_refused(model: Path) -> None:
    with pytest.raises(TrainerError, match="must return a TokenLoss of two vectors of 44 tokens"):
        make_learner(model, loss=no_vector).step(batch())


@EVERY
@pytest.mark.parametrize("minibatches", [1, 2])
def test_extra_passes_are_made_only_for_losses_that_need_them(model: Path, name: str, minibatches: int) -> None:
    learner, read = make_learner(model, loss=name, minibatches=minibatches), []
    inner = learner._read

    def spy(sequences: Any, rows: torch.Tensor) -> Any:
        read.append(len(rows))
        return inner(sequences, rows)

    learner._read = spy  # type: ignore[method-assign]
    metrics = learner.step(batch())
    everything, with_advantage = 12, int((collate(batch(), "group").advantages != 0).sum())
    assert with_advantage < everything
    if LOSSES[name].whole_update:
        assert metrics.measured_tokens == metrics.tokens
        # The proximal logprobs of the start of the step serve the first update as its own.
        again = everything // 2 if LOSSES[name].uses_proximal and minibatches == 2 else 0
        assert sum(read) == everything + again
    else:
        assert metrics.measured_tokens < metrics.tokens
        assert sum(read) == (with_advantage if LOSSES[name].uses_proximal and minibatches == 2 else 0)


@pytest.mark.parametrize("name", sorted(name for name, loss in LOSSES.items() if loss.whole_update))
def test_statistics_of_a_whole_update_include_trajectories_without_advantage(model: Path, name: str) -> None:
    data, calmer = batch(), batch()
    without = [not advantage for advantage in collate(data, "group").advantages.tolist()]
    for one, zero in zip(calmer.trajectories, without, strict=True):
        for segment in one.segments:
            segment.logprobs[:] = [-2.6 if zero else logprob for logprob in segment.logprobs]
    assert make_learner(model, loss=name).step(calmer).loss != pytest.approx(
        make_learner(model, loss=name).step(data).loss, rel=1e-3
    )
    assert make_learner(model, loss="ppo").step(calmer).loss == make_learner(model, loss="ppo").step(data).loss


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_figures_of_the_start_of_a_step_are_of_its_weights(model: Path, name: str) -> None:
    """Of all updates where the loss has these logprobs anyway, otherwise of the first."""
    settings = {"loss": name, "learning_rate": 0.05}
    data = batch()
    halves = make_learner(model, minibatches=2, **settings).step(data)
    covered = data if LOSSES[name].uses_proximal else TrainBatch(0, data.groups[:2])
    start = make_learner(model, **settings).step(covered)
    assert halves.k3 == pytest.approx(start.k3, rel=1e-5)
    assert halves.behaviour_ratio.mean == pytest.approx(start.behaviour_ratio.mean, rel=1e-5)
    assert halves.policy_ratio.mean != pytest.approx(make_learner(model, **settings).step(data).policy_ratio.mean)


@EVERY
def test_entropy_is_of_the_policy_however_the_loss_is_computed(model: Path, name: str) -> None:
    metrics = make_learner(model, loss=name, advantages="constant").step(batch())
    plain = load(model)
    entropies = []
    for one in batch().trajectories:
        logprobs = plain(torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
        each = -(logprobs.exp() * logprobs).sum(-1)
        entropies += [each[place - 1].item() for place, origin in enumerate(origins(one)) if origin]
    assert metrics.measured_tokens == len(entropies)
    assert metrics.entropy == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)


# -- choices that are not the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "longest_tokens"), [("token_mean", None), ("sequence_mean", None), ("sequence_sum", 8)]
)
def test_aggregation_and_constant_advantage_weigh_a_likelihood(
    model: Path, aggregation: str, longest_tokens: int | None
) -> None:
    """With advantage 1 and weight 1, the gradient is that of the logprobs, weighed as the aggregation says."""
    data, plain = batch(), load(model)
    total = torch.zeros(())
    counts = [one.sampled_tokens for one in data.trajectories]
    for one, count in zip(data.trajectories, counts, strict=True):
        logprobs = plain(torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
        places = [place for place, origin in enumerate(origins(one)) if origin]
        chosen = sum(logprobs[place - 1, one.token_ids[place]] for place in places)
        weight = {
            "token_mean": 1 / sum(counts),
            "sequence_mean": 1 / (len(counts) * count),
            "sequence_sum": 1 / (len(counts) * 8),
        }[aggregation]
        total = total - weight * chosen
    expected = torch.cat([value.flatten() for value in torch.autograd.grad(total, list(plain.parameters()))])
    for segment in (segment for one in data.trajectories for segment in one.segments if segment.sampled):
        segment.logprobs[:] = [-1.0] * len(segment.logprobs)
    learner = make_learner(
        model,
        loss="decoupled_ppo",
        loss_parameters={"cap": 1e-3},
        advantages="constant",
        aggregation=aggregation,
        longest_tokens=longest_tokens,
        max_gradient_norm=1e9,
    )
    _, gradient = trained(learner, data)
    torch.testing.assert_close(gradient * 1e3, expected, rtol=1e-4, atol=1e-6)


def origins(one: Any) -> list[bool]:
    return [segment.sampled for segment in one.segments for _ in segment.token_ids]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "sat", "loss_parameters": {"tau": 1.0}}, "loss_parameters has 'tau'; sat takes"),
        ({"advantages": "gae"}, "advantages is 'gae'; it must be one of group_normalized, group, leave_one_out"),
        ({"aggregation": "sum"}, "aggregation is 'sum'; it must be one of token_mean, sequence_mean, sequence_sum"),
        ({"aggregation": "sequence_sum"}, "longest_tokens is None with sequence_sum"),
        ({"longest_tokens": 5}, "longest_tokens is 5 with token_mean"),
        ({"aggregation": "sequence_sum", "longest_tokens": 0}, "longest_tokens is 0"),
    ],
)
def test_choice_that_does_not_exist_is_refused_with_those_that_do(
    model: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalTrainer(model, **settings)


# -- behaviour logprobs and versions -----------------------------------------------------------------------------------


def recorded(model: Path, *, temperature: float = 1.0, shift: float = 0.0) -> TrainBatch:
    """Data whose logprobs an engine of these weights would have reported."""
    plain = load(model)
    random = torch.Generator().manual_seed(0)
    members = []
    for member in range(6):
        prompt, answer = ([int(t) for t in torch.randint(2, 14, (n,), generator=random)] for n in (3, 8))
        logprobs = [logprob + shift for logprob in plain_logprobs(plain, prompt, answer, temperature)]
        members.append(trajectory(0, member, float(member), injected(*prompt), sampled(answer, logprobs)))
    return TrainBatch(0, [members])


@EVERY
def test_W10_recorded_logprobs_are_kept_when_data_is_stale(model: Path, name: str) -> None:
    """What the engine said is the denominator, though the trainer could have computed something else."""
    fresh = recorded(model, shift=-0.1)
    stale = TrainBatch(3, fresh.groups)
    metrics = make_learner(model, loss=name).step(stale)
    assert metrics.behaviour_ratio.mean == pytest.approx(math.exp(0.1), rel=1e-4)
    assert metrics.policy_ratio.mean == pytest.approx(math.exp(0.1), rel=1e-4)
    assert metrics.k1 == pytest.approx(-0.1, rel=1e-3)
    assert list(metrics.cut_by_staleness) == [3]
    assert metrics.agreement is None, "only fresh data can tell"


def test_V18_staleness_speaks_of_the_token_that_is_predicted() -> None:
    one = trajectory(0, 0, 1.0, injected(5, 6), sampled([7, 8], [-0.1, -0.2]), injected(9), sampled([3], [-0.3]))
    one.segments[1].versions[:] = [4, 6]
    one.segments[3].versions[:] = [7]
    sequences = collate(TrainBatch(9, [[one]]), "constant")
    assert sequences.targets.tolist() == [[6, 7, 8, 9, 3]]
    assert sequences.staleness.tolist() == [[0, 5, 3, 0, 2]]
    assert sequences.staleness[sequences.sampled].tolist() == [9 - 4, 9 - 6, 9 - 7]


def test_equal_weights_agree(model: Path) -> None:
    agreement = make_learner(model).step(recorded(model)).agreement
    assert agreement is not None
    assert agreement.gap_rms < 1e-4
    assert agreement.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert disagreement(agreement) is None


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_temperature_of_the_engine_is_recognised(model: Path, temperature: float) -> None:
    agreement = make_learner(model).step(recorded(model, temperature=temperature)).agreement
    assert agreement is not None
    assert agreement.slope == pytest.approx(temperature, rel=0.1)
    assert "temperature" in (disagreement(agreement) or "")


def test_another_model_is_recognised(model: Path, tmp_path: Path) -> None:
    other = character_llama(tmp_path, ALPHABET, hidden_size=32, seed=9)
    agreement = make_learner(model).step(recorded(other)).agreement
    assert agreement is not None
    assert "another model" in (disagreement(agreement) or "")
