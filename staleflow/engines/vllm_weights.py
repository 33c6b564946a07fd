"""The weight transfer backend ``staleflow``, in vLLM's worker: pull a version, check it, swap it in.

A version is pulled and checked in a thread, while the worker generates. An update then takes what is there, so that
the pause is only the swap. Up to the swap nothing of the model has changed, and the update can be refused; the
calls and their order are in ``docs/design/weights.md``.

Invariant: between two calls the model is wholly of one version. A swap that fails ends the process.
"""

import os
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from staleflow.engines.vllm_checkpoint import (
    Shapes,
    check_shapes,
    checkpoint_files,
    published_tensors,
    shapes_in,
    tensors_in,
)
from staleflow.engines.vllm_plugin import SECRET_VARIABLE
from staleflow.errors import WeightsError
from staleflow.transfer.client import Memory, pull

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig


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
    """How far a pull is; the reply to ``staleflow_prefetch``. ``seconds`` is how long it took, once it is over."""

    version: int
    state: str = "pulling"
    pulled_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
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
        self._expected = shapes_in(checkpoint_files(self.model_config.model, self.model_config.revision))
        self._memory = Memory()
        self._pull: _Pull | None = None
        self._accepted: _Pull | None = None

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do: the worker connects when it pulls."""

    def prefetch(self, source: dict[str, Any]) -> dict[str, Any]:
        """Start a pull or say how far it is; a failed one starts again after it has been told of once."""
        wanted = self._pull_of(self.parse_update_info(source))
        progress = asdict(wanted.progress)
        if progress["state"] == "failed":
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
            _repack_embeddings(self.model)
        except BaseException:  # noqa: BLE001 - whatever it was, the model is of two versions now
            traceback.print_exc()
            os._exit(1)
        self._accepted = self._pull = None

    def shutdown(self) -> None:
        """Let go of what was pulled."""
        self._pull = self._accepted = None
        self._memory = Memory()

    def _pull_of(self, source: Source) -> "_Pull":
        if self._pull is None or self._pull.source != source:
            if self._pull is not None and (self._pull.running or self._pull is self._accepted):
                # This memory is still written to, or about to be swapped in.
                self._memory = Memory()
            self._pull = _Pull(source, self._memory, self._expected, self._optional)
        return self._pull


class _Pull:
    """One version, on its way or at hand."""

    def __init__(self, source: Source, memory: Memory, expected: Shapes, optional: set[str]) -> None:
        self.source = source
        self.progress = Prefetch(source.version)
        self.tensors: dict[str, torch.Tensor] = {}
        self._expected = expected
        self._optional = optional
        self._memory = memory
        self._thread = threading.Thread(target=self._run, name="weights-pull", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it is neither ready nor has failed."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until it is ready or has failed. The pull itself has a time limit."""
        self._thread.join()

    def _run(self) -> None:
        began_s = perf_counter()
        try:
            tensors = self._pulled() if self.source.folder is None else self._mapped(Path(self.source.folder))
            check_shapes(
                {name: tuple(tensor.shape) for name, tensor in tensors.items()}, self._expected, self._optional
            )
        except Exception as error:  # noqa: BLE001 - it is told to whoever asks
            self._end("failed", began_s, str(error))
        else:
            self.tensors = tensors
            self._end("ready", began_s)

    def _end(self, state: str, began_s: float, error: str = "") -> None:
        self.progress.error = error
        self.progress.seconds = perf_counter() - began_s
        # Last, because it is what is waited for.
        self.progress.state = state

    def _mapped(self, folder: Path) -> dict[str, torch.Tensor]:
        self._report(*[sum(path.stat().st_size for path in folder.glob("*.safetensors"))] * 2)
        return published_tensors(folder)

    def _pulled(self) -> dict[str, torch.Tensor]:
        assert self.source.address is not None
        secret = os.environ.get(SECRET_VARIABLE)
        if not secret:
            raise WeightsError(f"${SECRET_VARIABLE} is not set where the vLLM server was started")
        pull(self.source.address, self.source.version, self._memory, secret=secret, progress=self._report)
        files = [file for name, file in self._memory.files.items() if name.endswith(".safetensors")]
        return {name: tensor for file in files for name, tensor in tensors_in(file).items()}

    def _report(self, pulled_bytes: int, total_bytes: int) -> None:
        self.progress.pulled_bytes, self.progress.total_bytes = pulled_bytes, total_bytes


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Let a head that shares its weight with the embedding see the new one.

    On CPUs vLLM computes with a repacked copy of each layer's weight. Its reload makes that of the layer for which a
    weight is in the checkpoint, and a tied head goes on with its old copy.
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)
