"""Weights and optimizer of the learner on disk: training goes on as if there had been no interruption."""

import asyncio
import resource
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from models import ALPHABET, load, pair
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from staleflow import LocalTrainer
from staleflow.errors import TrainerError
from staleflow.testing import character_llama
from staleflow.trainer.learner import Learner

pytestmark = pytest.mark.torch


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
