"""Weights files as they are published, beside the checkpoint that a vLLM server was started from."""

import json
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open

from staleflow.errors import WeightsError

Shapes: TypeAlias = dict[str, tuple[int, ...]]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DIFFERENCES_SHOWN = 3


def tensors_in(file: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file in memory, without copying: its header says where each of them begins."""
    header_bytes = int.from_bytes(file[:8], "little")
    header = json.loads(bytes(file[8 : 8 + header_bytes]))
    data = file[8 + header_bytes :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise WeightsError(f"{name} is of type {entry['dtype']}; {', '.join(DTYPES)} can be loaded")
        with warnings.catch_warnings():
            # A published file cannot be written, and nobody does.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            tensors[name] = torch.frombuffer(data[start:end], dtype=dtype).reshape(entry["shape"])
    return tensors


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
    shapes: Shapes = {}
    with ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(safe_open(path, "pt"))
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


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
