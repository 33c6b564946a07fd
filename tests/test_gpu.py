"""The whole path on a CUDA device; the same code runs on CPUs everywhere else."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import ALPHABET, batch, figures

from staleflow import LLM, Config, EmbeddedEngine, ListTasks, LocalTrainer, Pipeline, Report, launch_vllm, run
from staleflow.engines.base import Engine
from staleflow.testing import character_llama


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def devices() -> int:
    import torch

    return torch.cuda.device_count()


async def rollout(letter: str, llm: LLM) -> float:
    answer = await llm.generate(f"{letter}:", max_new_tokens=4)
    return answer.text.count(letter) / 4


def learns(model: Path, folder: Path, engines: Sequence[Engine], *, steps: int, max_staleness: int) -> Report:
    """A run that improves the model."""
    pipeline = Pipeline(
        tasks=ListTasks("abcdefgh"),
        rollout=rollout,
        engines=engines,
        trainer=LocalTrainer(model, learning_rate=3e-3),
        config=Config(steps=steps, batch_size=8, group_size=8, max_staleness=max_staleness),
        held_out="abcdefgh" * 16,
        run_dir=folder / "run",
        progress=False,
    )
    report = run(pipeline)
    assert report.accuracy_before is not None
    assert report.accuracy_after is not None
    assert report.accuracy_after > report.accuracy_before + 0.2
    assert report.staleness_max <= max_staleness
    return report


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.skipif("not has_cuda()", reason="no CUDA device")
def test_engine_and_trainer_agree_on_a_gpu(tmp_path: Path) -> None:
    model = character_llama(tmp_path / "model", "abcdefgh:")
    learns(model, tmp_path, [EmbeddedEngine(model)], steps=40, max_staleness=0)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.timeout(1200)
@pytest.mark.skipif("devices() < 2", reason="fewer than two CUDA devices, and NCCL needs one at each end")
@pytest.mark.parametrize("settings", [{}, {"broadcast_from": "127.0.0.1"}], ids=["pulled", "broadcast"])
def test_a_vllm_server_on_a_gpu_gets_its_weights(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = character_llama(tmp_path / "model", "abcdefgh:")
    # The sender and the trainer have the first GPU, the server the second.
    engines = launch_vllm(model, 1, environment={"CUDA_VISIBLE_DEVICES": "1"}, **settings)
    report = learns(model, tmp_path, engines, steps=60, max_staleness=2)
    assert report.fleet.deaths == 0


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.skipif("devices() < 2", reason="fewer than two CUDA devices")
@pytest.mark.parametrize("settings", [{}, {"packing": True}, {"sharded": False}, {"activation_checkpointing": True}])
def test_two_ranks_on_two_gpus_come_to_what_one_comes_to(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = character_llama(tmp_path / "model", ALPHABET, hidden_size=32)

    async def trained(ranks: int) -> dict[str, float]:
        trainer = LocalTrainer(model, ranks=ranks, learning_rate=1e-3, **settings)
        try:
            await trainer.start(tmp_path)
            await trainer.step(batch(0))
            return figures(await trainer.step(batch(1)))
        finally:
            await trainer.stop()

    assert asyncio.run(trained(2)) == pytest.approx(asyncio.run(trained(1)), rel=1e-3, abs=1e-4)
