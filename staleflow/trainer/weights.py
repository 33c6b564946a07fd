"""Weights on disk: what is published to engines, and the folder that transformers loads.

Parameters are gathered one at a time, and every rank has finished its collectives before it touches a file: a disk that
is full for one rank leaves none of the others waiting.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from staleflow.trainer.micro_batches import dealt
from staleflow.trainer.sharding import whole
from staleflow.trainer.world import World

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def write_share(model: nn.Module, world: World, folder: Path) -> None:
    """Write this rank's share of the parameters, each under its name and once if tied, to a file of its own."""
    parameters = dict(model.named_parameters())
    # As safetensors takes no empty file, a rank without a share writes none.
    owned = set(dealt([tensor.nbytes for tensor in parameters.values()], world.size)[world.rank])
    share = {}
    for index, (name, tensor) in enumerate(parameters.items()):
        full = whole(tensor.detach())
        if index in owned:
            share[name] = full.cpu().contiguous()
    if share:
        save_file(share, folder / f"weights-{world.rank}.safetensors")


def save_folder(model: Any, world: World, folder: Path, source: Path) -> None:
    """Write a folder that transformers loads; an older folder of that name stays whole until this one is.

    The weights meet in the host memory of rank 0. The tokenizer is that of ``source``.
    """
    gathered = _gathered(model, world)
    world.by_first(lambda: _write_folder(model, gathered, folder, source))


def _gathered(model: nn.Module, world: World) -> dict[str, Tensor]:
    """The model's state in rank 0, nothing elsewhere; what is tied there stays one tensor."""
    seen: dict[int, Tensor] = {}
    gathered = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            full = whole(tensor.detach())
            seen[id(tensor)] = full.cpu() if world.rank == 0 else torch.empty(0)
        gathered[name] = seen[id(tensor)]
    return gathered


def _write_folder(model: Any, gathered: dict[str, Tensor], folder: Path, source: Path) -> None:
    partial, replaced = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    model.save_pretrained(partial, state_dict=gathered)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, partial / name)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
