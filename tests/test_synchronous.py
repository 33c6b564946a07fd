"""``max_staleness=0`` is synchronous training: same data, same order, same losses as a plain loop."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from models import ALPHABET, EOS, figures, load

from staleflow import LLM, Config, ListTasks, LocalTrainer, Pipeline, Report
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.testing import ScriptedEngine, ScriptedTrainer, character_llama, run_virtually
from staleflow.trainer.learner import Learner
from staleflow.types import GenerateRequest, Generation, Segment, StepMetrics, TrainBatch, Trajectory

pytestmark = pytest.mark.torch

CONFIG = Config(steps=4, batch_size=3, group_size=4, max_staleness=0)
NEW_TOKENS = 5
TASKS = [[2 + (3 * task + place) % 12 for place in range(2 + task % 3)] for task in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_llama(tmp_path_factory.mktemp("model"), ALPHABET, hidden_size=32)


@pytest.fixture(scope="module")
def settings(model: Path) -> Any:
    return LocalTrainer(model, learning_rate=3e-3).settings


def reward_of(prompt: list[int], tokens: list[int]) -> float:
    return float(sum(token % 2 == prompt[0] % 2 for token in tokens))


def sample(model: Any, prompt: list[int], group: int, member: int) -> tuple[list[int], list[float]]:
    """What ``model`` answers as one member of one group: chance depends on nothing else."""
    rng = random.Random(f"{group}/{member}")
    tokens: list[int] = []
    logprobs: list[float] = []
    with torch.no_grad():
        while len(tokens) < NEW_TOKENS and EOS not in tokens:
            distribution = model(torch.tensor([prompt + tokens])).logits[0, -1].log_softmax(-1)
            [token] = rng.choices(range(len(distribution)), distribution.exp().tolist())
            tokens.append(token)
            logprobs.append(float(distribution[token]))
    return tokens, logprobs


class ModelEngine(ScriptedEngine):
    """A scripted engine whose script is a model; how long a token takes is random, what it is depends on weights."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(seed=seed, capacity=5)
        self._model = load(folder)
        self._times = random.Random(seed)

    async def generate(self, request: GenerateRequest) -> Generation:
        group, member, _, _ = map(int, request.request_id.split("."))
        await asyncio.sleep(self._times.expovariate(1.0))
        version = self.version
        tokens, logprobs = sample(self._model, request.token_ids, group, member)
        await asyncio.sleep(self._times.expovariate(1.0))
        return Generation(request.request_id, tokens, logprobs, [version] * len(tokens), "length")

    async def update_weights(self, version: int, weights: Path) -> int:
        from safetensors.torch import load_file

        await asyncio.sleep(self._times.expovariate(1.0))
        self._model.load_state_dict(load_file(weights / "weights-0.safetensors"), strict=False)
        self.version = version
        return version


class LearnerTrainer(ScriptedTrainer):
    """A learner in this process."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.learner = Learner(settings)
        self.metrics: list[StepMetrics] = []

    async def step(self, batch: TrainBatch) -> StepMetrics:
        await super().step(batch)
        self.metrics.append(self.learner.step(batch))
        return self.metrics[-1]

    async def publish(self, weights: Path) -> None:
        await asyncio.sleep(0.5)
        self.learner.write_weights(weights)


def plain_loop(folder: Path, settings: Any) -> tuple[list[TrainBatch], list[StepMetrics]]:
    """Synchronous GRPO: sample a batch with the present weights, train on it, go on. Groups count from 1."""
    policy, learner = load(folder), Learner(settings)
    batches, metrics, task = [], [], 0
    for step in range(CONFIG.steps):
        groups = []
        for _ in range(CONFIG.batch_size):
            group, prompt, members = task + 1, TASKS[task], []
            for member in range(CONFIG.group_size):
                tokens, logprobs = sample(policy, prompt, group, member)
                segments = [Segment(prompt, False), Segment(tokens, True, 0, logprobs, [step] * len(tokens))]
                reward = reward_of(prompt, tokens)
                members.append(Trajectory(task, group, member, 0, 0.0, segments=segments, reward=reward))
            groups.append(members)
            task += 1
        batches.append(TrainBatch(step, groups))
        metrics.append(learner.step(batches[-1]))
        policy.load_state_dict(dict(learner._model.named_parameters()), strict=False)
    return batches, metrics


async def rollout(prompt: list[int], llm: LLM) -> float:
    completion = await llm.generate(prompt, max_new_tokens=NEW_TOKENS)
    return reward_of(prompt, completion.token_ids)


def content(batch: TrainBatch) -> list[Any]:
    """What training can depend on: everything but times and which engine answered."""
    return [
        (one.task, one.group, one.member, one.token_ids, one.versions, one.reward, one.segments[1].logprobs)
        for one in batch.trajectories
    ]


@pytest.mark.parametrize("engines", [1, 2])
def test_synchronous_pipeline_equals_a_plain_loop(model: Path, settings: Any, tmp_path: Path, engines: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = LearnerTrainer(settings)

    async def main() -> Report:
        pipeline = Pipeline(
            tasks=ListTasks(TASKS, seed=None),
            rollout=rollout,
            engines=[ModelEngine(model, seed) for seed in range(engines)],
            trainer=trainer,
            config=CONFIG,
            parameter_server=SharedMemoryParameterServer(tmp_path),
            run_dir=tmp_path / "run",
            progress=False,
        )
        return await pipeline.run()

    report = run_virtually(main())
    batches, metrics = plain_loop(model, settings)
    torch.set_num_threads(before)
    assert report.staleness_max == 0
    for ours, plain in zip(trainer.batches, batches, strict=True):
        assert ours.step == plain.step
        for one, other in zip(content(ours), content(plain), strict=True):
            assert one == other
    for ours_measured, plain_measured in zip(trainer.metrics, metrics, strict=True):
        assert figures(ours_measured) == pytest.approx(figures(plain_measured), rel=1e-6, abs=1e-6)
    # The comparison would be empty if nothing was learnt: weights and therefore data have changed.
    assert len({measured.gradient_norm for measured in metrics}) == CONFIG.steps
    assert all(measured.gradient_norm > 0 for measured in metrics)
