"""What vLLM loads of staleflow: the entry point ``vllm.general_plugins`` and the extension of its workers.

vLLM imports this in each of its processes, so it imports nothing itself. The weight transfer backend is in
``vllm_weights``, which only a worker loads.
"""

from contextlib import suppress
from typing import Any

BACKEND = "staleflow"
WORKER_EXTENSION = "staleflow.engines.vllm_plugin.WeightPrefetch"
SECRET_VARIABLE = "STALEFLOW_SECRET"


def register() -> None:
    """Make the weight transfer backend known to vLLM; more than once does no harm."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, "staleflow.engines.vllm_weights", "PulledWeights")


class WeightPrefetch:
    """Methods that vLLM adds to its worker class by ``--worker-extension-cls``, for ``/collective_rpc``."""

    weight_transfer_engine: Any

    def staleflow_prefetch(self, source: dict[str, Any]) -> dict[str, Any]:
        """Start to pull a version, or tell how far that is; see ``docs/design/weights.md`` for both."""
        progress: dict[str, Any] = self.weight_transfer_engine.prefetch(source)
        return progress
