"""The learner, against a reference written out one trajectory at a time."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from models import ALPHABET, VOCABULARY, batch, figures, injected, load, make_learner, sampled, trajectory

from staleflow.errors import TrainerError
from staleflow.testing import character_llama
from staleflow.trainer.learner import Learner
from staleflow.trainer.sequences import collate
from staleflow.types import TrainBatch, Trajectory

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_llama(tmp_path_factory.mktemp("model"), ALPHABET, hidden_size=32)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learner._model.named_parameters()}


def reference_gradient(model: Any, trajectories: list[tuple[Trajectory, float]]) -> tuple[float, list[torch.Tensor]]:
    """Decoupled PPO before any update: ``-B A pi / sg(pi)`` per sampled token, mean over tokens, in plain loops."""
    total, count = torch.zeros(()), 0
    for one, advantage in trajectories:
        logprobs = model(torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
        position = 0
        for segment in one.segments:
            for index, token in enumerate(segment.token_ids):
                if segment.sampled:
                    logprob = logprobs[position - 1, token]
                    weight = min(5.0, math.exp(logprob.item() - segment.logprobs[index]))
                    total = total - weight * advantage * (logprob - logprob.detach()).exp()
                    count += 1
                position += 1
    loss = total / count
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def test_gradient_is_the_reference_gradient(model: Path) -> None:
    learner = make_learner(model, advantages="group")
    data = batch()
    pairs = []
    for group in data.groups:
        mean = sum(member.reward or 0.0 for member in group) / len(group)
        pairs += [(member, (member.reward or 0.0) - mean) for member in group]
    loss, expected = reference_gradient(load(model), pairs)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected))
    metrics = learner.step(data)
    assert metrics.loss == pytest.approx(loss, rel=1e-5)
    assert metrics.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert metrics.tokens == sum(member.sampled_tokens for member in data.trajectories)
    scale = min(1.0, 1.0 / norm)
    for parameter, gradient in zip(learner._model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * scale, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_result_does_not_depend_on_micro_batches(model: Path, minibatches: int) -> None:
    results = []
    for micro_batch_tokens in (1, 40, 10_000):
        learner = make_learner(model, micro_batch_tokens=micro_batch_tokens, minibatches=minibatches)
        results.append((learner.step(batch(0)), learner.step(batch(1)), weights(learner)))
    for other in results[1:]:
        for one, two in zip(results[0][:2], other[:2], strict=True):
            assert two.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-7)
            assert two.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)
            assert figures(two) == pytest.approx(figures(one), rel=1e-5, abs=1e-7)
        for name, value in results[0][2].items():
            torch.testing.assert_close(other[2][name], value, rtol=1e-4, atol=1e-5)


def test_later_minibatches_are_anchored_at_the_start_of_the_step(model: Path) -> None:
    learner = make_learner(model, minibatches=2, learning_rate=0.05)
    start = load(model)
    seen = []

    read = learner._read

    def spy(sequences: Any, rows: Any) -> Any:
        seen.append((sequences, rows.tolist(), read(sequences, rows)))
        return seen[-1][2]

    learner._read = spy  # type: ignore[method-assign]
    metrics = learner.step(batch())
    [(sequences, rows, (proximal, _))] = seen
    assert rows == sequences.advantages.nonzero()[:, 0].tolist(), "where nothing is learnt, nothing is computed"
    trajectories = batch().trajectories
    for row in rows:
        one = trajectories[row]
        with torch.no_grad():
            logprobs = start(torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
        for column in sequences.sampled[row].nonzero()[:, 0].tolist():
            expected = logprobs[column, one.token_ids[column + 1]].item()
            assert proximal[row, column].item() == pytest.approx(expected, abs=1e-5)
    # At this learning rate the first update moves the policy out of the clip range of the second.
    assert metrics.cut_share > 0


def test_injected_tokens_and_padding_never_count(model: Path) -> None:
    """Other tokens after the last sampled one, and other padding, change nothing."""
    data = batch()
    shorter = TrainBatch(
        0,
        [
            [
                trajectory(
                    member.group,
                    member.member,
                    member.reward or 0.0,
                    *(member.segments if member.segments[-1].sampled else member.segments[:-1]),
                )
                for member in group
            ]
            for group in data.groups
        ],
    )
    one, two = make_learner(model), make_learner(model)
    assert one.step(data) == two.step(shorter)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value, rtol=0, atol=0)


def test_collate_speaks_of_the_next_token() -> None:
    one = trajectory(0, 0, 1.0, injected(5, 6), sampled([7, 8], [-0.1, -0.2]), injected(9), sampled([3], [-0.3]))
    two = trajectory(0, 1, 0.0, injected(4), sampled([2], [-0.4]), injected(11, 12, 13))
    sequences = collate(TrainBatch(3, [[one, two]]), "group")
    assert sequences.inputs.tolist() == [[5, 6, 7, 8, 9], [4, 2, 0, 0, 0]]
    assert sequences.targets.tolist() == [[6, 7, 8, 9, 3], [2, 0, 0, 0, 0]]
    assert sequences.sampled.tolist() == [[False, True, True, False, True], [True, False, False, False, False]]
    expected = torch.tensor([[0, -0.1, -0.2, 0, -0.3], [-0.4, 0, 0, 0, 0]])
    torch.testing.assert_close(sequences.behaviour_logprobs, expected)
    assert sequences.lengths.tolist() == [5, 1]
    assert sequences.advantages.tolist() == [0.5, -0.5]


def test_loss_that_is_not_finite_is_refused(model: Path) -> None:
    learner = make_learner(model)
    before = weights(learner)
    data = batch()
    best = max(data.groups[1], key=lambda member: member.reward or 0.0)
    best.segments[1].logprobs[0] = math.nan
    with pytest.raises(
        TrainerError, match=r"step 0: .*a behaviour logprob is not finite; to blame: attempt 0 of member 2 of group 1"
    ):
        learner.step(data)
    for name, value in weights(learner).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert math.isfinite(learner.step(batch()).loss)


def test_groups_of_equal_rewards_only_count_in_the_mean(model: Path) -> None:
    data, equal = batch(), batch(1)
    for group in equal.groups:
        for member in group:
            member.reward = 0.5
    without = make_learner(model).step(data)
    with_equal = make_learner(model).step(TrainBatch(0, data.groups + equal.groups))
    assert with_equal.tokens > without.tokens
    assert with_equal.loss * with_equal.tokens == pytest.approx(without.loss * without.tokens, rel=1e-5)
    assert with_equal.gradient_norm * with_equal.tokens == pytest.approx(
        without.gradient_norm * without.tokens, rel=1e-5
    )
    assert with_equal.entropy == pytest.approx(without.entropy, rel=1e-6)


def test_batch_of_equal_rewards_changes_nothing(model: Path) -> None:
    learner = make_learner(model)
    before = weights(learner)
    data = batch()
    for member in data.trajectories:
        member.reward = 0.5
    metrics = learner.step(data)
    assert (metrics.loss, metrics.gradient_norm, metrics.entropy) == (0.0, 0.0, 0.0)
    for name, value in weights(learner).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_temperature_divides_the_logits(model: Path) -> None:
    one = make_learner(model, temperature=1.0).step(batch()).entropy
    hot = make_learner(model, temperature=10.0).step(batch()).entropy
    assert one < hot < math.log(VOCABULARY) + 1e-4


def test_fresh_data_has_no_lag(model: Path) -> None:
    from models import plain_logprobs

    plain = load(model)
    groups = [
        [
            trajectory(0, member, float(member), injected(3, 4), sampled(tokens, plain_logprobs(plain, [3, 4], tokens)))
            for member, tokens in enumerate(([5, 6, 7], [8], [9, 1]))
        ]
    ]
    metrics = make_learner(model).step(TrainBatch(0, groups))
    assert metrics.k3 == pytest.approx(0.0, abs=1e-8)
    assert metrics.cut_share == 0.0


def test_checkpoint_loads_and_replaces(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    learner = make_learner(model)
    learner.save(tmp_path / "checkpoint")
    learner.step(batch())
    learner.save(tmp_path / "checkpoint")
    loaded = load(tmp_path / "checkpoint")
    for name, value in weights(learner).items():
        torch.testing.assert_close(dict(loaded.named_parameters())[name], value, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12+3=")) == list("12+3=")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_published_weights_are_the_parameters_by_name(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    learner = make_learner(model)
    learner.step(batch())
    learner.write_weights(tmp_path)
    published = load_file(tmp_path / "weights-0.safetensors")
    # Embeddings are tied: one tensor, one name.
    assert published.keys() == dict(load(model).named_parameters()).keys()
    assert "lm_head.weight" not in published
    for name, value in weights(learner).items():
        torch.testing.assert_close(published[name], value, rtol=0, atol=0)


def test_learning_rate_rises_then_falls_to_a_tenth(model: Path) -> None:
    learner = make_learner(model, learning_rate=0.01, warmup_steps=3, decay_steps=8)
    used = []
    for step in range(12):
        learner.step(batch(step))
        used.append(learner._optimizer.param_groups[0]["lr"])
    warmed = [0.25, 0.5, 0.75, *[1.0] * 9]
    decayed = [1 - 0.9 * step / 8 for step in range(9)] + [0.1] * 3
    assert used == pytest.approx([0.01 * share * part for share, part in zip(warmed, decayed, strict=True)])


def test_learning_rate_stays_unless_told(model: Path) -> None:
    learner = make_learner(model, learning_rate=0.01)
    learner.step(batch())
    assert learner._optimizer.param_groups[0]["lr"] == 0.01
