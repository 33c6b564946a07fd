"""Weights and optimizer on disk, as torch.distributed.checkpoint reads and writes them: by parameter name.

Names make the files independent of the number of ranks. Names, shapes and the sizes of files are checked against the
model before anything of it changes. Bytes that are not as they were written are not noticed here: a checkpoint's
manifest has sums of them.
"""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
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
    fresh = not optimizer.state
    weights, moments = get_state_dict(model, optimizer)
    if fresh:
        # Torch has made moments by a step without gradients, and counts it: the first real one would be smaller.
        for kept in optimizer.state.values():
            kept["step"].zero_()
    return {"model": weights, "optimizer": moments}


def _check(state: State, folder: Path) -> None:
    metadata = _metadata(folder)
    saved = metadata.state_dict_metadata
    wanted = _flat(state, "")
    for name, tensor in wanted.items():
        found = saved.get(name)
        if not isinstance(found, TensorStorageMetadata) or found.size != tensor.shape:
            shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else "missing"
            raise TrainerError(f"{name} is {shape}, but the model has {tuple(tensor.shape)}: it is of another model")
    extra = {name for name, found in saved.items() if isinstance(found, TensorStorageMetadata)} - wanted.keys()
    if extra:
        raise TrainerError(f"{min(extra)} is not part of the model: it is of another model")
    _check_sizes(metadata, folder)


def _metadata(folder: Path) -> Metadata:
    path = folder / ".metadata"
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (pickle.UnpicklingError, EOFError, ImportError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise TrainerError(f"{path} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise TrainerError(f"{path} is damaged: it holds a {type(metadata).__name__}")
    return metadata


def _check_sizes(metadata: Metadata, folder: Path) -> None:
    """Refuse files that end too soon: read into the model, they would leave it half of one and half of another."""
    for part in metadata.storage_data.values():
        path = folder / part.relative_path
        if not path.is_file():
            raise TrainerError(f"{path} is missing")
        if path.stat().st_size < part.offset + part.length:
            raise TrainerError(f"{path} is damaged: it ends at byte {path.stat().st_size}")


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
