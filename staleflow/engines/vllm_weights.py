"""The weight transfer backend ``staleflow``, in vLLM's worker: pull a version, check it, swap it in.

A version is pulled and checked in a thread, while the worker generates. An update then takes what is there, so that
the pause is only the swap. Up to the swap nothing of the model has changed, and the update can be refused; the
calls and their order are in ``docs/design/weights.md``.

Invariant: between two calls the model is wholly of one version. A swap that fails ends the process.
"""

import json
import os
import threading
import traceback
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from staleflow.engines.vllm_plugin import SECRET_VARIABLE
from staleflow.errors import WeightsError
from staleflow.transfer.client import Memory, pull

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

Shapes = dict[str, tuple[int, ...]]

DIFFERENCES_SHOWN = 3


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is nothing to agree upon beforehand."""


@dataclass
class Source(WeightTransferUpdateInfo):
    """Where a version is: a folder on this host, or the address of a parameter server."""

    version: int
    folder: str | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.address is None):
            raise ValueError(f"version {self.version} needs either a folder or an address")


@dataclass
class Prefetch:
    """How far a pull is; the reply to ``staleflow_prefetch``."""

    version: int
    state: str = "pulling"
    pulled_bytes: int = 0
    total_bytes: int = 0
    error: str = ""


class PulledWeights(WeightTransferEngine[Nothing, Source]):
    """Weights that the worker pulls by itself, in the format of the model's own checkpoint."""

    init_info_cls = Nothing
    update_info_cls = Source
    supports_draft_weight_update = False

    def __init__(
        self, config: "WeightTransferConfig", vllm_config: "VllmConfig", device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        tied = self.model_config.hf_text_config.tie_word_embeddings
        self._optional = {"lm_head.weight"} if tied else set()
        self._expected = _shapes(_checkpoint_files(self.model_config.model, self.model_config.revision))
        self._pull: _Pull | None = None
        self._accepted: _Pull | None = None

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do: the worker connects when it pulls."""

    def prefetch(self, source: dict[str, Any]) -> dict[str, Any]:
        """Start a pull or say how far it is; a failed one starts again after it has been told of once."""
        wanted = self._pull_of(self.parse_update_info(source))
        progress = asdict(wanted.progress)
        if wanted.progress.state == "failed":
            self._pull = None
        return progress

    def start_weight_update(self) -> None:
        """Forget an update that was broken off before its swap."""
        self._accepted = None

    def receive_weights(self, update_info: Source) -> None:
        """Have the version at hand and checked; raises :class:`WeightsError` with the model untouched."""
        wanted = self._pull_of(update_info)
        wanted.join()
        if wanted.progress.state == "failed":
            self._pull = None
            raise WeightsError(f"version {update_info.version} refused: {wanted.progress.error}")
        self._accepted = wanted

    def finish_weight_update(self) -> None:
        """Swap the accepted version in; without one, nothing changes."""
        if self._accepted is None:
            return
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(self._accepted.tensors.items()))
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:  # noqa: BLE001 - whatever it was, the model is of two versions now
            traceback.print_exc()
            os._exit(1)
        self._accepted.close()
        self._accepted = self._pull = None

    def shutdown(self) -> None:
        """Let go of what was pulled."""
        for held in (self._pull, self._accepted):
            if held is not None:
                held.close()
        self._pull = self._accepted = None

    def _pull_of(self, source: Source) -> "_Pull":
        if self._pull is None or self._pull.source != source:
            self._pull = _Pull(source, self._expected, self._optional)
        return self._pull


class _Pull:
    """One version, on its way or at hand."""

    def __init__(self, source: Source, expected: Shapes, optional: set[str]) -> None:
        self.source = source
        self.progress = Prefetch(source.version)
        self.tensors: dict[str, torch.Tensor] = {}
        self._expected = expected
        self._optional = optional
        self._memory = Memory()
        self._thread = threading.Thread(target=self._run, name="weights-pull", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it is ready or has failed. The pull itself has a time limit."""
        self._thread.join()

    def close(self) -> None:
        """Free the memory."""
        self.tensors = {}
        self._memory.close()

    def _run(self) -> None:
        try:
            paths = self._pulled()
            _check(_shapes(paths), self._expected, self._optional)
            for path in paths:
                self.tensors |= load_file(path)
            for tensor in self.tensors.values():
                _touch(tensor)
        except Exception as error:  # noqa: BLE001 - it is told to whoever asks
            self.close()
            self.progress.error = str(error)
            self.progress.state = "failed"
        else:
            self.progress.state = "ready"

    def _pulled(self) -> list[Path]:
        if self.source.folder is not None:
            paths = sorted(Path(self.source.folder).glob("*.safetensors"))
            if not paths:
                raise WeightsError(f"there are no weights in {self.source.folder}")
            self._report(*[sum(path.stat().st_size for path in paths)] * 2)
            return paths
        assert self.source.address is not None
        secret = os.environ.get(SECRET_VARIABLE)
        if not secret:
            raise WeightsError(f"${SECRET_VARIABLE} is not set where the vLLM server was started")
        pull(self.source.address, self.source.version, self._memory, secret=secret, progress=self._report)
        return [path for name, path in self._memory.paths.items() if name.endswith(".safetensors")]

    def _report(self, pulled_bytes: int, total_bytes: int) -> None:
        self.progress.pulled_bytes, self.progress.total_bytes = pulled_bytes, total_bytes


def _touch(tensor: torch.Tensor) -> None:
    """Have the pages of a mapped tensor at hand before the pause instead of in it."""
    tensor.flatten().view(torch.uint8)[:: os.sysconf("SC_PAGESIZE")].sum()


def _checkpoint_files(model: str, revision: str | None) -> list[Path]:
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


def _shapes(paths: Iterable[Path]) -> Shapes:
    shapes: Shapes = {}
    with ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(safe_open(path, "pt"))
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _check(shapes: Shapes, expected: Shapes, optional: set[str]) -> None:
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
