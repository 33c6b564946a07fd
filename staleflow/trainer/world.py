"""The ranks that train together, as one of them sees it: who it is, and the few things they tell each other.

Beside the collectives in here there are only those of FSDP and of torch.distributed.checkpoint. Every rank must call
the same ones in the same order.
"""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from staleflow.errors import TrainerError

HERE = "127.0.0.1"


class World:
    """A process among ``size``; alone, every collective is nothing.

    Tensors of :meth:`sum` and :meth:`as_first` may be on any device.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.device = _device(local_rank)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place, with the same bits on all of them."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def as_first(self, values: Tensor) -> Tensor:
        """Those of rank 0, in place: for what decides which collectives come next."""
        if self.size > 1:
            dist.broadcast(values, 0)
        return values

    def by_first(self, work: Callable[[], None]) -> None:
        """Let rank 0 do what only one may; if it cannot, that is an error of every rank."""
        error: OSError | SafetensorError | None = None
        if self.rank == 0:
            try:
                work()
            except (OSError, SafetensorError) as raised:
                error = raised
        if self.size > 1:
            told = [None if error is None else str(error)]
            dist.broadcast_object_list(told, 0)
            if self.rank > 0 and told[0] is not None:
                raise TrainerError(told[0])
        if error is not None:
            raise error


def meet(rank: int, size: int, port: int, listening: int | None, timeout_s: float) -> World:
    """The world of ranks that were started on this machine; the first accepts the others at its socket."""
    world = World(rank, size, local_rank=rank)
    if size > 1:
        # The name of a machine may stand for an address that cannot be reached, even by itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            HERE, port, size, rank == 0, timeout=timeout, master_listen_fd=listening
        )
        dist.init_process_group(_backend(world), store=store, rank=rank, world_size=size, timeout=timeout)
    return world


def meet_as_launched(timeout_s: float) -> World:
    """The world that torchrun describes in the environment."""
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    if world.size > 1:
        dist.init_process_group(_backend(world), timeout=timedelta(seconds=timeout_s))
    return world


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise TrainerError(
            f"rank {local_rank} of this machine has no GPU of its own, as there are {torch.cuda.device_count()}: start "
            "fewer ranks"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _backend(world: World) -> str:
    return "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
