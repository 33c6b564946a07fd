"""What the tests with real models share: tiny Llamas, weights files, and the logprobs that plain torch gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from staleflow import LocalTrainer
from staleflow.testing import character_llama
from staleflow.types import Segment, StepMetrics, TrainBatch, Trajectory

if TYPE_CHECKING:
    from staleflow.trainer.learner import Learner

ALPHABET = "0123456789+="
VOCABULARY = 2 + len(ALPHABET)
EOS = 1


def endless_llama(folder: Path, *, max_tokens: int = 512) -> Path:
    """A tiny Llama that has no end token, so that it always samples as much as it is asked for."""
    character_llama(folder, ALPHABET, hidden_size=32, layers=2, max_tokens=max_tokens)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def write_parameters(model: Any, folder: Path) -> Path:
    """As a trainer publishes them, in two files."""
    from safetensors.torch import save_file

    parameters = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    half = len(parameters) // 2
    folder.mkdir()
    for name, part in (("a", list(parameters)[:half]), ("b", list(parameters)[half:])):
        save_file({parameter: parameters[parameter] for parameter in part}, folder / f"{name}.safetensors")
    return folder


def always(model: Any, token: int) -> Any:
    """Change a Llama with tied embeddings so that it says ``token`` with certainty, whatever it has read.

    Layers add nothing to the residual stream, which is the embedding: one dimension, twice as large for ``token``.
    """
    import torch

    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[token, 0] = 2.0
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 20.0
    return model


def plain_logprobs(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Logprobs of ``tokens`` after ``prompt``, by one plain forward pass."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, :-1].double() / temperature
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(prompt + tokens)[1:, None])[:, 0]
    return [float(value) for value in chosen[len(prompt) - 1 :]]


def sampled(tokens: list[int], logprobs: list[float]) -> Segment:
    return Segment(tokens, True, 0, logprobs, [0] * len(tokens))


def figures(metrics: StepMetrics) -> dict[str, float]:
    """Every number in the metrics, by its path."""

    def walk(path: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(f"{path}.{name}", inner)
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                yield from walk(f"{path}.{index}", inner)
        elif value is not None:
            yield path, value

    return dict(walk("", msgspec.to_builtins(metrics)))


def injected(*tokens: int) -> Segment:
    return Segment(list(tokens), False)


def trajectory(group: int, member: int, reward: float, *segments: Segment) -> Trajectory:
    return Trajectory(group, group, member, 0, 0.0, segments=list(segments), reward=reward)


def make_learner(model: Path, **settings: Any) -> "Learner":
    from staleflow.trainer.learner import Learner

    return Learner(LocalTrainer(model, **({"learning_rate": 1e-3} | settings)).settings)


def batch(step: int = 0) -> TrainBatch:
    """Two turns with an injected observation between, one after the end, and lengths that differ."""
    import torch

    random = torch.Generator().manual_seed(step)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in torch.randint(2, VOCABULARY, (count,), generator=random)]

    def logprobs(count: int) -> list[float]:
        return [float(value) for value in -2.6 + 0.4 * torch.randn(count, generator=random)]

    groups = []
    for group in range(4):
        prompt = tokens(2 + group)
        members = []
        for member in range(3):
            first, second = 1 + (group + member) % 3, 1 + member
            segments = [injected(*prompt), sampled(tokens(first), logprobs(first))]
            if member > 0:
                segments += [injected(*tokens(2)), sampled(tokens(second), logprobs(second))]
            if member == 2:
                segments += [injected(*tokens(5))]
            members.append(trajectory(group, member, float((group * member) % 3), *segments))
        groups.append(members)
    return TrainBatch(step, groups)


def pair(step: int) -> TrainBatch:
    """A batch of one group of two, whose tokens depend on the step."""
    members = [
        trajectory(0, member, float(member), injected(3, 4), sampled([5 + step, 6 + member], [-2.5, -2.6]))
        for member in range(2)
    ]
    return TrainBatch(step, [members])
