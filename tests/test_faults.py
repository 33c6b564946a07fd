"""Bad input of the trainer: what is refused before anything is computed, and updates that are not finite."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

import torch
from models import ALPHABET, VOCABULARY, batch, injected, make_learner, sampled, trajectory

from staleflow import LocalTrainer
from staleflow.errors import ConfigError, TrainerError
from staleflow.testing import character_llama
from staleflow.trainer.faults import MAX_SKIPPED_IN_A_ROW, Dump
from staleflow.trainer.learner import Learner
from staleflow.trainer.loss_settings import AdvantageKind
from staleflow.trainer.losses import LOSSES, TokenLoss, Tokens
from staleflow.trainer.sequences import collate
from staleflow.types import Attempt, ModelLimits, Segment, TrainBatch, Trajectory

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

MAX_TOKENS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_llama(tmp_path_factory.mktemp("model"), ALPHABET, hidden_size=32, max_tokens=MAX_TOKENS)


def faulty(model: Path, folder: Path, **settings: Any) -> Learner:
    """A learner that dumps into a folder and decays weights."""
    made = LocalTrainer(model, **({"learning_rate": 1e-3, "weight_decay": 0.5} | settings)).settings
    return Learner(msgspec.structs.replace(made, dump_folder=str(folder)))


def whole_state(learner: Learner) -> dict[str, Any]:
    """Weights and everything that the optimizer keeps, copied."""
    named = dict(learner._model.named_parameters())
    moments = {
        f"{name}.{key}": value.clone()
        for name, parameter in named.items()
        for key, value in learner._optimizer.state.get(parameter, {}).items()
    }
    return {name: value.detach().clone() for name, value in named.items()} | moments


def assert_untouched(learner: Learner, before: dict[str, Any]) -> None:
    after = whole_state(learner)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def attempt(one: Trajectory) -> Attempt:
    return Attempt(one.task, one.group, one.member, one.attempt)


def read_dump(path: str | Path) -> Dump:
    return msgspec.convert(json.loads(Path(path).read_text()), Dump)


def spoil_record(data: TrainBatch, value: float = math.nan) -> Trajectory:
    """Make one trajectory with an advantage one that an engine has recorded badly."""
    bad = data.groups[1][2]
    bad.segments[1].logprobs[0] = value
    return bad


def infinite_at_7(policy_logprobs: torch.Tensor, tokens: Tokens, *, share: float) -> TokenLoss:
    """Infinite for the longest sequence of a batch, for as much of it as ``share`` says."""
    sequence = torch.arange(len(tokens.lengths)).repeat_interleave(tokens.lengths)
    worst = sequence == tokens.lengths.argmax()
    loss = -share * tokens.advantages * policy_logprobs
    return TokenLoss(torch.where(worst, loss / 0.0, loss), worst)


def no_slope_at_zero(policy_logprobs: torch.Tensor, tokens: Tokens, *, scale: float) -> TokenLoss:
    """Finite, with a gradient that is not."""
    loss = scale * (policy_logprobs - policy_logprobs.detach()).sqrt()
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


# -- updates that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["decoupled_ppo", "m2po"])
def test_recorded_logprob_that_is_not_finite_stops_the_run_and_is_dumped(
    model: Path, tmp_path: Path, name: str, value: float
) -> None:
    learner = faulty(model, tmp_path, loss=name, minibatches=2)
    learner.step(batch(1))
    before, data = whole_state(learner), batch()
    bad = spoil_record(data, value)
    with pytest.raises(
        TrainerError, match=r"step 0: .*behaviour logprob is not finite; to blame: attempt 0 of member 2 of"
    ):
        learner.step(data)
    assert_untouched(learner, before)
    [path] = tmp_path.iterdir()
    dump = read_dump(path)
    assert (dump.step, dump.reason) == (0, "a behaviour logprob is not finite")
    [offender] = dump.offenders
    assert msgspec.msgpack.encode(offender.trajectory) == msgspec.msgpack.encode(bad), "all of it, NaN included"
    assert math.isfinite(learner.step(batch()).loss)


@pytest.mark.parametrize("name", ["decoupled_ppo", "sat"])
def test_recorded_logprob_that_is_not_finite_skips_its_update_alone(model: Path, tmp_path: Path, name: str) -> None:
    learner = faulty(model, tmp_path, loss=name, minibatches=2, on_nonfinite="skip")
    data = batch()
    bad = spoil_record(data)
    metrics = learner.step(data)
    assert (metrics.skipped_updates, metrics.tokens) == (1, sum(one.sampled_tokens for one in data.trajectories))
    [skipped] = metrics.skipped
    assert (skipped.update, skipped.offenders) == (0, [attempt(bad)])
    assert math.isnan(read_dump(skipped.dump).offenders[0].trajectory.segments[1].logprobs[0])
    # What was left is what is made of the other groups alone.
    alone = faulty(model, tmp_path, loss=name)
    expected = alone.step(TrainBatch(0, data.groups[2:]))
    assert (metrics.loss, metrics.gradient_norm) == pytest.approx((expected.loss, expected.gradient_norm), rel=1e-5)
    after = whole_state(learner)
    for name_, value in whole_state(alone).items():
        torch.testing.assert_close(after[name_], value, rtol=1e-5, atol=1e-7)


def poison(learner: Learner, token: int) -> None:
    """Make a model that yields NaN for whoever has read ``token``."""
    embeddings = learner._model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[token] = math.nan


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
@pytest.mark.parametrize("name", ["ppo", "m2po", "sat"])
def test_model_that_yields_nan_for_some_names_those(
    model: Path, tmp_path: Path, name: str, micro_batch_tokens: int
) -> None:
    learner = faulty(model, tmp_path, loss=name, micro_batch_tokens=micro_batch_tokens, on_nonfinite="skip")
    token = 5
    original = learner._model.forward

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        output = original(input_ids=input_ids, **options)
        read = (input_ids == token).cumsum(1) > 0
        output.logits = output.logits.masked_fill(read[..., None], math.nan)
        return output

    learner._model.forward = forward
    data = batch()
    learner._optimizer.zero_grad()
    before = whole_state(learner)
    metrics = learner.step(data)
    assert_untouched(learner, before)
    expected = [attempt(one) for one in data.trajectories if reads(one, token) and computed(learner, data, one)]
    assert 0 < len(expected) < len(data.trajectories)
    [skipped] = metrics.skipped
    assert skipped.offenders == expected
    assert skipped.reason.startswith("loss nan, gradient norm ")
    assert (metrics.loss, metrics.gradient_norm, metrics.measured_tokens) == (0.0, 0.0, 0)
    assert len(read_dump(skipped.dump).offenders) == len(expected)


def reads(one: Trajectory, token: int) -> bool:
    """Whether a logprob of a sampled token depends on ``token``."""
    tokens = [token for segment in one.trained_segments for token in segment.token_ids]
    return token in tokens[:-1]


def computed(learner: Learner, data: TrainBatch, one: Trajectory) -> bool:
    """Whether the loss depends on it: on all, or on those with an advantage."""
    return learner._loss.whole_update or one in with_advantage(data)


def with_advantage(data: TrainBatch) -> list[Trajectory]:
    advantages = collate(data, "group").advantages.tolist()
    return [one for one, advantage in zip(data.trajectories, advantages, strict=True) if advantage]


def test_weights_that_are_nan_blame_everything_and_end_the_run(model: Path, tmp_path: Path) -> None:
    learner = faulty(model, tmp_path, on_nonfinite="skip")
    poison(learner, 0)
    for step in range(MAX_SKIPPED_IN_A_ROW - 1):
        [skipped] = learner.step(batch(step)).skipped
        assert skipped.offenders == [attempt(one) for one in with_advantage(batch(step))]
    with pytest.raises(TrainerError, match="5 updates in a row, so the weights or the model are at fault"):
        learner.step(batch(MAX_SKIPPED_IN_A_ROW))


def test_sound_update_between_starts_the_count_anew(model: Path, tmp_path: Path) -> None:
    learner = faulty(model, tmp_path, on_nonfinite="skip", minibatches=2)
    for step in range(2 * MAX_SKIPPED_IN_A_ROW):
        data = batch(step)
        spoil_record(data)
        assert learner.step(data).skipped_updates == 1


def test_updates_of_one_step_count_towards_the_limit(model: Path, tmp_path: Path) -> None:
    learner = faulty(model, tmp_path, on_nonfinite="skip", minibatches=4)
    poison(learner, 0)
    rewarded = batch()
    for index, one in enumerate(rewarded.trajectories):
        one.reward = float(index)
    assert learner.step(rewarded).skipped_updates == 4
    with pytest.raises(TrainerError, match=r"update 0 was not made: .*; that is 5 updates in a row"):
        learner.step(rewarded)


def test_own_loss_that_is_infinite_names_its_trajectory(model: Path, tmp_path: Path) -> None:
    learner = faulty(model, tmp_path, loss=infinite_at_7, loss_parameters={"share": 1.0}, advantages="constant")
    data, before = batch(), whole_state(learner)
    worst = max(data.trajectories, key=lambda one: one.sampled_tokens)
    with pytest.raises(TrainerError, match=r"step 0: update 0 was not made: loss -?(inf|nan), .*on_nonfinite='skip'"):
        learner.step(data)
    assert_untouched(learner, before)
    [path] = tmp_path.iterdir()
    [offender] = read_dump(path).offenders
    assert (offender.trajectory, offender.advantage) == (worst, 1.0)


def test_gradient_that_is_not_finite_blames_all_of_its_update(model: Path, tmp_path: Path) -> None:
    learner = faulty(
        model, tmp_path, loss=no_slope_at_zero, loss_parameters={"scale": 1.0}, minibatches=2, on_nonfinite="skip"
    )
    before, data = whole_state(learner), batch()
    first, second = learner.step(data).skipped
    assert_untouched(learner, before)
    assert first.reason.startswith("loss 0.0, gradient norm ")
    assert first.offenders == [attempt(one) for group in data.groups[:2] for one in group]
    assert second.offenders == [attempt(one) for group in data.groups[2:] for one in group]


def test_checkpoint_after_a_skipped_first_update_loads(model: Path, tmp_path: Path) -> None:
    learner = faulty(model, tmp_path, on_nonfinite="skip")
    data = batch()
    spoil_record(data)
    assert learner.step(data).skipped_updates == 1
    learner.save_state(tmp_path / "state")
    again = faulty(model, tmp_path)
    again.load_state(tmp_path / "state")
    assert again.step(batch(1)) == learner.step(batch(1))


def test_dump_that_cannot_be_written_hides_nothing(model: Path, tmp_path: Path) -> None:
    learner = faulty(model, tmp_path / "missing")
    data = batch()
    spoil_record(data)
    with pytest.raises(
        TrainerError, match=r"member 2 of group 1 .*; dump: none, .* could not be written: No such file"
    ):
        learner.step(data)


def test_policy_that_does_not_exist_is_refused(model: Path) -> None:
    wrong: Any = "ignore"
    with pytest.raises(ConfigError, match="on_nonfinite is 'ignore'; it must be one of stop, skip"):
        LocalTrainer(model, on_nonfinite=wrong)


# -- batches without anything to learn --------------------------------------------------------------------------------


ADVANTAGES: tuple[AdvantageKind, ...] = ("group_normalized", "group", "leave_one_out", "batch_normalized")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_nothing_to_learn_moves_nothing(model: Path, tmp_path: Path, name: str) -> None:
    """Neither weight decay nor the momentum of earlier steps."""
    learner = faulty(model, tmp_path, loss=name, minibatches=2)
    learner.step(batch())
    for kind in ADVANTAGES:
        learner._settings = msgspec.structs.replace(learner._settings, advantages=kind)
        before, data = whole_state(learner), batch(1)
        for one in data.trajectories:
            one.reward = 0.3
        metrics = learner.step(data)
        assert_untouched(learner, before)
        assert (metrics.gradient_norm, metrics.updates_without_gradient, metrics.skipped_updates) == (0.0, 2, 0)
        assert metrics.loss == 0.0


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_group_of_equal_rewards_gives_no_gradient_of_its_own(model: Path, kind: AdvantageKind) -> None:
    data = batch()
    for one in data.groups[1]:
        one.reward = 1.0
    other = TrainBatch(0, [list(group) for group in data.groups])
    # What the group's members said must not matter, where it is not compared with the rest of the batch.
    other.groups[1] = [
        trajectory(1, one.member, 1.0, *one.segments[:1], sampled([9] * 3, [-2.0] * 3)) for one in data.groups[1]
    ]
    norms = [
        make_learner(model, advantages=kind, aggregation="sequence_mean").step(each).gradient_norm
        for each in (data, other)
    ]
    # What is compared with all of the batch has an advantage all the same.
    assert (norms[0] == pytest.approx(norms[1], rel=1e-5)) == (kind != "batch_normalized")


def test_tokens_that_are_all_masked_move_nothing(model: Path, tmp_path: Path) -> None:
    learner = faulty(model, tmp_path, loss="icepop", loss_parameters={"lowest": 1e8, "highest": 1e9})
    learner._settings = msgspec.structs.replace(learner._settings, advantages="constant")
    before = whole_state(learner)
    metrics = learner.step(batch())
    assert_untouched(learner, before)
    assert (metrics.loss, metrics.gradient_norm, metrics.cut_share) == (0.0, 0.0, 1.0)
    assert metrics.updates_without_gradient == 1


# -- batches that are refused -----------------------------------------------------------------------------------------


def empty_group(data: TrainBatch) -> None:
    data.groups[2] = []


def no_reward(data: TrainBatch) -> None:
    data.groups[2][1].reward = None


def bad_reward(data: TrainBatch) -> None:
    data.groups[2][1].reward = math.nan


def nothing_sampled(data: TrainBatch) -> None:
    data.groups[2][1].segments = [injected(3, 4)]


def no_prompt(data: TrainBatch) -> None:
    data.groups[2][1].segments = [sampled([3, 4], [-1.0, -1.0])]


def fewer_logprobs(data: TrainBatch) -> None:
    data.groups[2][1].segments[1] = Segment([3, 4], True, 0, [-1.0], [0, 0])


def too_long(data: TrainBatch) -> None:
    data.groups[2][1].segments = [injected(*[3] * MAX_TOKENS), sampled([4], [-1.0]), injected(*[3] * 9)]


def wrong_prompt(data: TrainBatch) -> None:
    data.groups[2][1].segments = [injected(3, VOCABULARY), sampled([4], [-1.0])]


def wrong_sample(data: TrainBatch) -> None:
    data.groups[2][1].segments = [injected(3, 3), sampled([4, -1], [-1.0, -1.0])]


REFUSED: dict[Callable[[TrainBatch], None], str] = {
    empty_group: "group number 2 of the batch has no members",
    no_reward: "member 1 of group 2 has reward None",
    bad_reward: "member 1 of group 2 has reward nan",
    nothing_sampled: "member 1 of group 2 has no sampled token",
    no_prompt: "member 1 of group 2 begins with a sampled token",
    fewer_logprobs: "member 1 of group 2 has 2 sampled tokens with 1 logprobs and 2 versions",
    too_long: f"member 1 of group 2 has {MAX_TOKENS + 1} tokens; the model takes at most {MAX_TOKENS}",
    wrong_prompt: f"member 1 of group 2 has token id {VOCABULARY} at position 1; the model's vocabulary has 14",
    wrong_sample: "member 1 of group 2 has token id -1 at position 3; the model's vocabulary has 14",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_unfit_batch_is_refused_before_anything_is_computed(
    model: Path, tmp_path: Path, spoil: Callable[[TrainBatch], None]
) -> None:
    learner, data = faulty(model, tmp_path, on_nonfinite="skip"), batch()
    before = whole_state(learner)
    learner._model.forward = None
    spoil(data)
    with pytest.raises(TrainerError, match=f"^step 0: {REFUSED[spoil]}.*; nothing was trained$"):
        learner.step(data)
    assert_untouched(learner, before)


def test_batch_without_groups_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"^step 3: the batch has no groups; nothing was trained$"):
        faulty(model, tmp_path).step(TrainBatch(3, []))


def test_longest_sequence_and_last_token_are_trained(model: Path, tmp_path: Path) -> None:
    """What comes after the last sampled token is not computed, and may be as long as it likes."""
    learner, data = faulty(model, tmp_path), batch()
    assert learner.limits == ModelLimits(VOCABULARY, MAX_TOKENS)
    data.groups[2][1].segments = [
        injected(*[0] * (MAX_TOKENS - 1)),
        sampled([VOCABULARY - 1], [-1.0]),
        injected(*[VOCABULARY] * 9),
    ]
    assert math.isfinite(learner.step(data).loss)
