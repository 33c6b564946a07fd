"""Weights and optimizer on disk, as torch.distributed.checkpoint reads and writes them: by parameter name.

Names make the files independent of the number of ranks. What is read is checked against the model before anything of
it changes.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from staleflow.errors import TrainerError
from staleflow.trainer.world import World

State = dict[str, Any]


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, world: World) -> None:
    """Write both to a new folder; raises :class:`TrainerError` where the disk does not take it."""
    world.by_first(folder.mkdir)
    try:
        with _single_process():
            write(_state(model, optimizer), checkpoint_id=folder)
    except CheckpointException as error:
        raise TrainerError(_first(error)) from error


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read both; raises :class:`TrainerError` that names the first tensor that does not fit."""
    state = _state(model, optimizer)
    try:
        _check(state, folder)
        with _single_process():
            read(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise TrainerError(_first(error)) from error
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    # They come from whoever made the optimizer; those in the file are of an earlier run.
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _check(state: State, folder: Path) -> None:
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = _flat(state, "")
    for name, tensor in wanted.items():
        found = saved.get(name)
        if not isinstance(found, TensorStorageMetadata) or found.size != tensor.shape:
            shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else "missing"
            raise TrainerError(f"{name} is {shape}, but the model has {tuple(tensor.shape)}: it is of another model")
    extra = {name for name, found in saved.items() if isinstance(found, TensorStorageMetadata)} - wanted.keys()
    if extra:
        raise TrainerError(f"{min(extra)} is not part of the model: it is of another model")


def _flat(state: State, prefix: str) -> dict[str, Tensor]:
    flat = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            flat[prefix + name] = value
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
    return flat


@contextmanager
def _single_process() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process is what is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _first(error: CheckpointException) -> str:
    return "; ".join(f"{type(failure).__name__}: {failure}" for failure, _ in error.failures.values())
