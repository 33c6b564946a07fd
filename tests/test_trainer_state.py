"""Weights and optimizer of the learner on disk: training goes on as if there had been no interruption."""

import asyncio
import resource
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from models import ALPHABET, load, pair
from safetensors import SafetensorError
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from staleflow import LocalTrainer
from staleflow.errors import TrainerError
from staleflow.testing import character_llama
from staleflow.trainer import state as state_module
from staleflow.trainer.learner import Learner

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_llama(tmp_path_factory.mktemp("model"), ALPHABET, hidden_size=32)


def make(model: Path, **settings: Any) -> Learner:
    return Learner(LocalTrainer(model, **({"learning_rate": 1e-3, "warmup_steps": 4} | settings)).settings)


def parameters(learner: Learner) -> dict[str, torch.Tensor]:
    return dict(learner._model.named_parameters())


def test_V3_step_after_resume_is_that_of_the_uninterrupted_trainer(model: Path, tmp_path: Path) -> None:
    """In another process, over the wire; without the optimizer's moments or with another step it would not be."""
    uninterrupted = make(model)
    for step in range(3):
        uninterrupted.step(pair(step))
    uninterrupted.save_state(tmp_path / "state")
    expected = uninterrupted.step(pair(3))
    trainer = LocalTrainer(model, learning_rate=1e-3, warmup_steps=4)

    async def resumed() -> None:
        await trainer.start(tmp_path)
        try:
            with pytest.raises(TrainerError, match=r"could not read .*nowhere: .*No such file"):
                await trainer.load_state(tmp_path / "nowhere")
            await trainer.load_state(tmp_path / "state")
            metrics = await trainer.step(pair(3))
            await trainer.save(tmp_path / "model")
            with pytest.raises(TrainerError, match=r"could not write .*state: .*File exists"):
                await trainer.save_state(tmp_path / "state")
            await trainer.save_state(tmp_path / "again")
        finally:
            await trainer.stop()
        assert metrics.tokens == expected.tokens
        assert metrics.loss == pytest.approx(expected.loss, rel=1e-5)
        assert metrics.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)

    asyncio.run(resumed())
    after = dict(load(tmp_path / "model").named_parameters())
    torch.testing.assert_close(after, parameters(uninterrupted), rtol=1e-5, atol=1e-7)
    again = make(model)
    again.load_state(tmp_path / "again")
    torch.testing.assert_close(parameters(again), parameters(uninterrupted), rtol=1e-5, atol=1e-7)


def test_the_optimizer_is_part_of_it(model: Path, tmp_path: Path) -> None:
    learner, forgetful = make(model), make(model)
    learner.step(pair(0))
    learner.save_state(tmp_path / "state")
    forgetful._model.load_state_dict(learner._model.state_dict())
    loaded = make(model)
    loaded.load_state(tmp_path / "state")
    for one in (learner, forgetful, loaded):
        one.step(pair(1))
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(parameters(loaded)[name], parameters(learner)[name])
    assert not torch.allclose(parameters(forgetful)[name], parameters(learner)[name], rtol=1e-5, atol=1e-6)


def test_settings_are_those_of_the_resumed_trainer(model: Path, tmp_path: Path) -> None:
    learner = make(model)
    learner.step(pair(0))
    learner.save_state(tmp_path / "state")
    other = make(model, weight_decay=0.5, betas=(0.5, 0.6))
    other.load_state(tmp_path / "state")
    (group,) = other._optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.5, 0.6))


def test_torch_reads_it_without_staleflow(model: Path, tmp_path: Path) -> None:
    learner = make(model)
    learner.step(pair(0))
    learner.save_state(tmp_path / "state")
    dcp_to_torch_save(tmp_path / "state", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=False)
    torch.testing.assert_close(state["model"]["model.norm.weight"], parameters(learner)["model.norm.weight"].data)
    assert state["optimizer"]["state"]["model.norm.weight"]["step"] == 1


def test_disk_full_is_an_error_of_the_trainer(model: Path, tmp_path: Path) -> None:
    learner = make(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(TrainerError, match=r"OSError: .*File too large"):
            learner.save_state(tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_file_is_named_and_changes_nothing(model: Path, tmp_path: Path, name: str) -> None:
    saved = make(model)
    saved.step(pair(0))
    saved.save_state(tmp_path / "state")
    path = tmp_path / "state" / name
    content = path.read_bytes()
    learner = make(model)
    before = whole(learner)
    for damaged in (b"", content[: len(content) // 2], content[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(TrainerError, match=rf"{name} is damaged: "):
            learner.load_state(tmp_path / "state")
    path.unlink()
    with pytest.raises((TrainerError, FileNotFoundError), match=rf"{name}"):
        learner.load_state(tmp_path / "state")
    after = whole(learner)
    torch.testing.assert_close({each: after[each] for each in before}, before, rtol=0, atol=0)
    assert learner.step(pair(1)) == make(model).step(pair(1)), "not even the optimizer has changed"


def without(state: Any, name: str) -> Any:
    del state["optimizer"]["state"]["model.norm.weight"][name]
    return state


def widened(state: Any, name: str) -> Any:
    moments = state["optimizer"]["state"]["model.norm.weight"]
    moments[name] = torch.zeros(33)
    return state


def renamed(state: Any, name: str) -> Any:
    moments = state["optimizer"]["state"]["model.norm.weight"]
    moments["momentum_buffer"] = moments.pop(name)
    return state


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (without, "exp_avg", r"optimizer.state.model.norm.weight.exp_avg is missing"),
        (without, "step", r"optimizer.state.model.norm.weight.step is missing"),
        (widened, "exp_avg_sq", r"model.norm.weight.exp_avg_sq is \(33,\), but the model has \(32,\)"),
        (renamed, "exp_avg", r"model.norm.weight.exp_avg is missing"),
    ],
)
def test_optimizer_of_another_kind_or_shape_is_named_and_changes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, name: str, message: str
) -> None:
    saved = make(model)
    saved.step(pair(0))
    with monkeypatch.context() as patched:
        original = state_module._state
        patched.setattr(state_module, "_state", lambda *parts: change(original(*parts), name))
        saved.save_state(tmp_path / "state")
    learner = make(model)
    learner.step(pair(0))
    before = whole(learner)
    with pytest.raises(TrainerError, match=message):
        learner.load_state(tmp_path / "state")
    torch.testing.assert_close(whole(learner), before, rtol=0, atol=0)


def whole(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights and moments, copied."""
    kept = {
        f"{number}.{name}": value
        for number, moments in enumerate(learner._optimizer.state.values())
        for name, value in moments.items()
    }
    return {name: value.detach().clone() for name, value in (parameters(learner) | kept).items()}


def test_saving_before_the_first_update_changes_nothing(model: Path, tmp_path: Path) -> None:
    saved, loaded, undisturbed = make(model), make(model), make(model)
    saved.save_state(tmp_path / "state")
    loaded.load_state(tmp_path / "state")
    for learner in (saved, loaded, undisturbed):
        for step in range(2):
            learner.step(pair(step))
    torch.testing.assert_close(whole(saved), whole(undisturbed), rtol=0, atol=0)
    torch.testing.assert_close(whole(loaded), whole(undisturbed), rtol=0, atol=0)


@pytest.mark.parametrize("what", ["published weights", "model"])
def test_disk_full_leaves_no_half_model_under_its_name(model: Path, tmp_path: Path, what: str) -> None:
    learner = make(model)
    learner.save(tmp_path / "model")
    (tmp_path / "published weights").mkdir()
    older = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    learner.step(pair(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        write = learner.save if what == "model" else learner.write_weights
        with pytest.raises((OSError, SafetensorError), match="File too large"):
            write(tmp_path / what)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == older
    learner.save(tmp_path / "model")
    torch.testing.assert_close(dict(load(tmp_path / "model").named_parameters()), parameters(learner), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"hidden_size": 64},
            r"embed_tokens.weight is \(14, 32\), but the model has \(14, 64\): it is of another model",
        ),
        ({"hidden_size": 32, "layers": 1}, r"layers.1.* is not part of the model: it is of another model"),
        ({"hidden_size": 32, "layers": 3}, r"layers.2.* is missing, but the model has .*: it is of another model"),
    ],
)
def test_state_of_another_model_is_named_and_changes_nothing(
    model: Path, tmp_path: Path, other: dict[str, int], message: str
) -> None:
    make(model).save_state(tmp_path / "state")
    learner = make(character_llama(tmp_path / "other", ALPHABET, **other))
    before = {name: value.detach().clone() for name, value in parameters(learner).items()}
    with pytest.raises(TrainerError, match=message):
        learner.load_state(tmp_path / "state")
    torch.testing.assert_close(parameters(learner), before, rtol=0, atol=0, check_stride=False)
