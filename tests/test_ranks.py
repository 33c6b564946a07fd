"""Two ranks come to what one comes to, however the work is divided, and write what any number can read."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from models import ALPHABET, batch, load, make_learner, pair
from rank_cases import RANKS, Result, cases, computed, learner, name_and_way, weights
from torch.distributed.tensor import DTensor

from staleflow import LocalTrainer
from staleflow.errors import ConfigError, TrainerError
from staleflow.testing import character_llama
from staleflow.trainer import sharding
from staleflow.trainer.world import World

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

ENOUGH_S = 540.0
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_llama(tmp_path_factory.mktemp("model"), ALPHABET, hidden_size=32)


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have computed and written."""
    folder = tmp_path_factory.mktemp("ranks")
    character_llama(folder / "reference", ALPHABET, hidden_size=32, seed=5)
    for way in ("sharded", "replicated"):
        (folder / way / "published").mkdir(parents=True)
    one = learner(model, {})
    one.step(pair(0))
    one.save_state(folder / "state of one")
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        port = str(meeting.getsockname()[1])
        processes = []
        for rank in range(RANKS):
            listening = [meeting.fileno()] if rank == 0 else []
            command = [str(rank), port, str(listening[0]) if listening else "-", str(model), str(folder)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "rank_cases", *command],
                    env=os.environ | {"PYTHONPATH": path},
                    pass_fds=listening,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
    try:
        said = [process.communicate(timeout=ENOUGH_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return folder


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], limit: float) -> None:
    """By the norm of the difference, relative to that of the tensor: what is 0 but for rounding has no digits."""
    assert one.keys() == other.keys()
    total = torch.cat([value.flatten() for value in other.values()]).norm()
    for name, value in other.items():
        assert (one[name] - value).norm() <= limit * max(value.norm(), 1e-2 * total), name


def assert_same(result: Result, expected: Result) -> None:
    for one, other in zip(result.metrics, expected.metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert_close(result.gradient, expected.gradient, 1e-5)
    assert_close(result.weights, expected.weights, 1e-5)


@pytest.fixture(scope="module")
def expected(model: Path, folder: Path) -> dict[str, Result]:
    """By one rank that takes everything at once."""
    return {
        name: computed(learner(model, case.settings), case.batches)
        for name, case in cases(folder / "reference").items()
    }


NAMES = list(cases(Path()))


@pytest.mark.parametrize(("name", "way"), name_and_way())
def test_two_ranks_come_to_what_one_comes_to(folder: Path, expected: dict[str, Result], name: str, way: str) -> None:
    results = [Result(*read(folder / f"{way}: {name} {rank}")) for rank in range(RANKS)]
    for result in results:
        assert_same(result, expected[name])
    assert results[0].metrics == results[1].metrics, "every rank has those of the whole batch"
    for parameter, value in results[0].weights.items():
        torch.testing.assert_close(results[1].weights[parameter], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 30, "packing": True},
        {"packing": True},
        {"activation_checkpointing": True},
    ],
    ids=["accumulated", "packed and accumulated", "packed", "recomputed"],
)
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_comes_to_the_same_however_it_divides_the_work(
    model: Path, folder: Path, expected: dict[str, Result], name: str, settings: dict[str, Any]
) -> None:
    case = cases(folder / "reference")[name]
    assert_same(computed(learner(model, case.settings | settings), case.batches), expected[name])


def test_bfloat16_rounds_alike_on_any_number_of_ranks(model: Path, folder: Path) -> None:
    exact, one = (computed(learner(model, {"dtype": dtype}), [batch(0), batch(1)]) for dtype in ("float32", "bfloat16"))
    assert_close(one.gradient, exact.gradient, 0.2)
    assert one.metrics[0][".entropy"] != exact.metrics[0][".entropy"]
    assert {value.dtype for value in one.weights.values()} == {torch.float32}
    two = Result(*read(folder / "bfloat16 0"))
    assert two.metrics[0] == pytest.approx(one.metrics[0], rel=0.02, abs=0.02)
    assert_close(two.gradient, one.gradient, 0.05)


@pytest.mark.parametrize("way", ["sharded", "replicated"])
def test_two_ranks_publish_every_parameter_once(folder: Path, way: str) -> None:
    from safetensors.torch import load_file

    files = [load_file(path) for path in sorted((folder / way / "published").iterdir())]
    assert len(files) == RANKS
    assert not set(files[0]) & set(files[1])
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    largest = max(tensor.nbytes for file in files for tensor in file.values())
    assert abs(sizes[0] - sizes[1]) <= largest
    went_on, _ = read(folder / way / "went on 0")
    torch.testing.assert_close(files[0] | files[1], went_on, rtol=0, atol=0, check_stride=False)


@pytest.mark.parametrize("way", ["sharded", "replicated"])
def test_state_goes_from_one_rank_to_two_and_back(model: Path, folder: Path, way: str) -> None:
    one = learner(model, {})
    one.load_state(folder / "state of one")
    one.step(pair(1))
    went_on, note = read(folder / way / "went on 0")
    assert note is None
    assert_close(went_on, weights(one), 1e-6)

    back = learner(model, {})
    back.load_state(folder / way / "state")
    torch.testing.assert_close(weights(back), went_on, rtol=0, atol=0)
    # The moments too, or the next step would be another.
    back.step(pair(2))
    one.step(pair(2))
    assert_close(weights(back), weights(one), 1e-6)


@pytest.mark.parametrize("way", ["sharded", "replicated"])
def test_two_ranks_save_a_folder_that_transformers_loads(folder: Path, way: str) -> None:
    went_on, _ = read(folder / way / "went on 0")
    loaded = dict(load(folder / way / "saved").named_parameters())
    torch.testing.assert_close({name: value.detach() for name, value in loaded.items()}, went_on, rtol=0, atol=0)
    assert (folder / way / "saved" / "tokenizer.json").exists()


def test_divergence_from_the_reference_pulls_where_there_is_no_advantage(model: Path, folder: Path) -> None:
    """Without advantages the loss is ``kl_weight`` times the mean of k3, of every sampled token."""
    data = batch()
    for member in data.trajectories:
        member.reward = 0.5
    one = make_learner(model, reference=folder / "reference", kl_weight=0.3, max_gradient_norm=1e9)
    metrics = one.step(data)
    assert metrics.measured_tokens == metrics.tokens

    policy, reference = load(model), load(folder / "reference")
    values = []
    for member in data.trajectories:
        inputs = torch.tensor([member.token_ids])
        own = policy(inputs).logits[0].log_softmax(-1)
        with torch.no_grad():
            other = reference(inputs).logits[0].log_softmax(-1)
        origins = [segment.sampled for segment in member.segments for _ in segment.token_ids]
        for place, origin in enumerate(origins):
            if origin:
                gap = (other - own)[place - 1, member.token_ids[place]]
                values.append(gap.exp() - 1 - gap)
    mean = torch.stack(values).mean()
    assert metrics.reference_k3 == pytest.approx(mean.item(), rel=1e-4)
    assert metrics.loss == pytest.approx(0.3 * mean.item(), rel=1e-4)
    wanted = torch.autograd.grad(0.3 * mean, list(policy.parameters()))
    for parameter, gradient in zip(one._model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_model_that_cannot_tell_packed_sequences_apart_is_refused(tmp_path: Path) -> None:
    """Its state goes on from one sequence to the next, whatever the position ids say."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=14, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=1.0)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    make_learner(tmp_path)
    with pytest.raises(TrainerError, match="packing=True, but the model does not keep packed sequences apart"):
        make_learner(tmp_path, packing=True)


def test_reference_of_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = character_llama(tmp_path, "ab", hidden_size=32)
    with pytest.raises(TrainerError, match=r"another vocabulary than .*: 4 and 14 tokens"):
        make_learner(model, reference=other, kl_weight=0.1)


def test_where_torch_cannot_shard_every_rank_keeps_all_and_the_user_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "why_not_sharded", lambda world: "RuntimeError: no such collective")
    one = learner(model, {}, World(0, RANKS))
    assert one.note == "FSDP2 does not run here, so every rank keeps all of the model: RuntimeError: no such collective"
    assert not any(isinstance(value, DTensor) for value in one._model.parameters())
    assert learner(model, {"sharded": False}, World(0, RANKS)).note is None, "that was asked for"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "ranks is 0; it must be above 0"),
        ({"kl_weight": 0.1}, r"kl_weight is 0.1 with reference None; give both, or none"),
        ({"kl_weight": -0.1, "reference": "model"}, "kl_weight is -0.1; it must not be negative"),
        ({"reference": "model"}, "kl_weight is 0.0 with reference .*; give both, or none"),
        ({"reference": "/nowhere", "kl_weight": 0.1}, "reference '/nowhere': no such Hugging Face folder"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be one of float32, bfloat16"),
    ],
)
def test_setting_that_cannot_be_is_refused(model: Path, settings: dict[str, Any], message: str) -> None:
    chosen: dict[str, Any] = {name: model if value == "model" else value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        LocalTrainer(model, **chosen)
