"""How the weights of a version get into a vLLM server: pulled by its workers, or broadcast to them.

Pulled weights are in the workers' memory before the server pauses, and are checked there; until the swap an update can
be refused. A broadcast goes straight into the model during the pause. It needs no copy in the workers' host memory, and
once it has begun it must succeed.
"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from staleflow.abandon import abandon
from staleflow.engines.nccl_messages import Broadcast, Done, Join, Prepare
from staleflow.engines.vllm_api import VllmApi
from staleflow.engines.vllm_checkpoint import (
    check_shapes,
    checkpoint_files,
    dtype_name,
    is_tied,
    parameters_in,
    shapes_in,
)
from staleflow.errors import EngineError, EngineReplyError, WeightsError
from staleflow.process import Child

SENDER = "staleflow.engines.nccl_sender"
FIRST_PREFETCH_WAIT_S = 0.01
LONGEST_PREFETCH_WAIT_S = 0.5
PACKED_BYTES = 256 << 20
PACKED_BUFFERS = 2
"""What each worker needs besides the model while it receives is so many times as much, or more: a buffer also takes the
parameter with which it overflows."""


class Carrier(Protocol):
    """A way for weights."""

    changes_at_once: bool
    """Whether announcing an update changes the model, so that one which fails after that has spoilt it."""

    async def open(self) -> None:
        """Make the way, once it is known what the server serves. Raises :class:`EngineError`."""

    async def prepare(self, version: int, folder: Path) -> None:
        """Do what can be done while the server generates. Raises :class:`EngineError`, and nothing has changed."""

    async def hand_over(self, version: int, folder: Path) -> None:
        """Get the weights into the server, which has paused and was told of an update. Raises :class:`EngineError`."""

    async def close(self) -> None:
        """Let go of everything. Idempotent."""


class Pull:
    """The server's workers pull, through the plug-in.

    Args:
        api: the server.
        pull_from: address of a parameter server; None if a version's folder is on the server's host.
    """

    changes_at_once = False

    def __init__(self, api: VllmApi, pull_from: str | None) -> None:
        self._api = api
        self._pull_from = pull_from

    async def open(self) -> None:
        """There is nothing to make."""

    async def prepare(self, version: int, folder: Path) -> None:
        """Have every worker pull, and return when all have."""
        source = self._source(version, folder)
        wait_s = FIRST_PREFETCH_WAIT_S
        while True:
            progress = await self._api.prefetch(source)
            for worker in progress:
                if worker.state == "failed":
                    raise EngineError(f"{self._api.name} could not pull version {version}: {worker.error}")
                if worker.version != version:
                    raise EngineReplyError(f"{self._api.name} pulls version {worker.version} instead of {version}")
            if all(worker.state == "ready" for worker in progress):
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_PREFETCH_WAIT_S)

    async def hand_over(self, version: int, folder: Path) -> None:
        """Name the version that was pulled."""
        await self._api.update_weights(self._source(version, folder))

    async def close(self) -> None:
        """There is nothing to let go of."""

    def _source(self, version: int, folder: Path) -> dict[str, int | str]:
        where = {"folder": str(folder)} if self._pull_from is None else {"address": self._pull_from}
        return {"version": version, **where}


class NcclBroadcast:
    """A child process sends from a GPU of this host to all workers of a server, by vLLM's own backend ``nccl``.

    Each server has a child and a group of its own, so that a slow or dead one delays no other.

    Args:
        api: the server.
        model: folder of the model that it serves.
        address: of this host, where the child and the workers meet.
        device: the GPU that the child sends from.
        workers: how many there are.
        log_folder: where the child writes its log.
    """

    changes_at_once = True

    def __init__(self, api: VllmApi, model: Path, *, address: str, device: str, workers: int, log_folder: Path) -> None:
        self._api = api
        self._model = model
        self._join = Join(address, device, workers + 1, PACKED_BYTES, PACKED_BUFFERS)
        self._log_folder = log_folder
        self._sender: Child[Done] | None = None
        self._prepared: dict[str, list[Any]] = {}
        """What the server is told of the version that was prepared."""

    async def open(self) -> None:
        """Let the child and the workers meet."""
        join = self._join
        self._sender = sender = await Child.spawn(
            f"{self._api.name}-sender",
            SENDER,
            log_path=self._log_folder / f"{self._api.name}-sender.log",
            receives=Done,
            error=EngineError,
        )
        await sender.send(join)
        meeting = {"master_address": join.address, "master_port": (await sender.receive()).port}
        group = {"rank_offset": 1, "world_size": join.world_size}
        wire = {"packed": True, "packed_buffer_size_bytes": PACKED_BYTES, "packed_num_buffers": PACKED_BUFFERS}
        # Of an earlier connection, if there was one.
        await self._api.shutdown_weight_transfer()
        await _both(self._api.init_weight_transfer(meeting | group | wire), sender.receive())

    async def prepare(self, version: int, folder: Path) -> None:
        """See that these are weights of the model, and that the child has them: later it would be too late."""
        try:
            self._prepared = await asyncio.to_thread(self._checked, folder)
        except WeightsError as error:
            raise EngineError(f"{self._api.name} cannot be given version {version}: {error}") from error
        await self._ask(Prepare(str(folder)))

    async def hand_over(self, version: int, folder: Path) -> None:
        """Send while the workers receive."""
        await _both(self._api.update_weights(self._prepared), self._ask(Broadcast()))

    async def close(self) -> None:
        """End the child."""
        if self._sender is not None:
            await self._sender.stop()

    async def _ask(self, message: Prepare | Broadcast) -> None:
        assert self._sender is not None
        await self._sender.send(message)
        await self._sender.receive()

    def _checked(self, folder: Path) -> dict[str, list[Any]]:
        served = shapes_in(checkpoint_files(str(self._model), None))
        parameters = parameters_in(sorted(folder.glob("*.safetensors")))
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        check_shapes(shapes, served, {"lm_head.weight"} if is_tied(self._model) else set())
        return {
            "names": list(parameters),
            "dtype_names": [dtype_name(*entry) for entry in parameters.items()],
            "shapes": [list(shape) for shape in shapes.values()],
        }


async def _both(server: Coroutine[Any, Any, object], sender: Coroutine[Any, Any, object]) -> None:
    """Wait for both ends of a transfer; each waits for the other, so the first failure is that of both."""
    ends = [asyncio.ensure_future(server), asyncio.ensure_future(sender)]
    try:
        for end in (await asyncio.wait(ends, return_when=asyncio.FIRST_EXCEPTION))[0]:
            end.result()
    finally:
        for end in ends:
            abandon(end)
