"""Weights files as they are published, beside the checkpoint that a vLLM server was started from."""

import json
import mmap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from staleflow.errors import WeightsError
from staleflow.transfer.mapping import published_file

if TYPE_CHECKING:
    import torch

Shapes: TypeAlias = dict[str, tuple[int, ...]]

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Those that can be loaded, as safetensors and as torch name them."""
LENGTH_BYTES = 8
"""Of the number at the head of a safetensors file, which says how long its header is."""
DIFFERENCES_SHOWN = 3


class Parameter(NamedTuple):
    """One entry in the header of a safetensors file; it is at ``start`` to ``end`` in what follows the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header(text: bytes) -> dict[str, Parameter]:
    """The parameters in a file, in the order of its header."""
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    return {
        name: Parameter(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in entries.items()
    }


def parameters_in(paths: Iterable[Path]) -> dict[str, Parameter]:
    """The parameters in files, of which only the headers are read. Raises :class:`WeightsError`."""
    found: dict[str, Parameter] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                found |= header(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise WeightsError(f"{path} is no safetensors file: {error}") from error
    return found


def is_tied(model: Path) -> bool:
    """Whether the output head of a model is its embedding, so that a checkpoint may hold it twice or once."""
    return bool(json.loads((model / "config.json").read_bytes()).get("tie_word_embeddings", False))


def dtype_name(name: str, parameter: Parameter) -> str:
    """What torch calls a parameter's type; raises :class:`WeightsError` for one that cannot be loaded."""
    dtype = DTYPES.get(parameter.dtype)
    if dtype is None:
        raise WeightsError(f"{name} is of type {parameter.dtype}; {', '.join(DTYPES)} can be loaded")
    return dtype


def tensors_in(file: memoryview) -> "dict[str, torch.Tensor]":
    """The tensors of a safetensors file in memory, without copying: its header says where each of them begins."""
    import torch

    begin = LENGTH_BYTES + int.from_bytes(file[:LENGTH_BYTES], "little")
    data = file[begin:]
    tensors = {}
    for name, parameter in header(bytes(file[LENGTH_BYTES:begin])).items():
        dtype = getattr(torch, dtype_name(name, parameter))
        with warnings.catch_warnings():
            # A published file cannot be written, and nobody does.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(data[parameter.start : parameter.end], dtype=dtype)
        tensors[name] = flat.reshape(parameter.shape)
    return tensors


def published_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """The tensors of a published version, mapped, all pages at hand, in the order of its files and their headers."""
    files = [published_file(path) for path in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise WeightsError(f"there are no weights in {folder}")
    for file in files:
        _touch(file)
    return {name: tensor for file in files for name, tensor in tensors_in(file).items()}


def _touch(file: memoryview) -> None:
    """Have all pages of a mapped file at hand, and let other threads run meanwhile."""
    import numpy as np

    np.frombuffer(file, np.uint8)[:: mmap.PAGESIZE].sum()


def checkpoint_files(model: str, revision: str | None) -> list[Path]:
    """The safetensors files that the model was loaded from."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    else:
        names = {path.name for path in folder.glob("*.safetensors")}
    if not names:
        raise WeightsError(f"{folder} holds no safetensors files, so weights cannot be checked against them")
    return [folder / name for name in sorted(names)]


def shapes_in(paths: Iterable[Path]) -> Shapes:
    """Names and shapes of all parameters in safetensors files, from their headers."""
    return {name: parameter.shape for name, parameter in parameters_in(paths).items()}


def check_shapes(shapes: Shapes, expected: Shapes, optional: set[str]) -> None:
    """Refuse weights of another model; raises :class:`WeightsError`."""
    missing = expected.keys() - shapes.keys() - optional
    unknown = shapes.keys() - expected.keys() - optional
    common = sorted(shapes.keys() & expected.keys())
    wrong = [
        *(f"{name} is missing" for name in sorted(missing)),
        *(f"{name} is unknown" for name in sorted(unknown)),
        *(
            f"{name} is of shape {list(shapes[name])} instead of {list(expected[name])}"
            for name in common
            if shapes[name] != expected[name]
        ),
    ]
    if wrong:
        shown = "; ".join(wrong[:DIFFERENCES_SHOWN])
        more = f" and {len(wrong) - DIFFERENCES_SHOWN} more" if len(wrong) > DIFFERENCES_SHOWN else ""
        raise WeightsError(f"these are weights of another model: {shown}{more}")
