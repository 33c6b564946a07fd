"""Sends published weights to the workers of one vLLM server: ``python -m staleflow.engines.nccl_sender FD``.

Data flow: files of a version, mapped, to a GPU of this host, parameter by parameter, and from there packed into buffers
that NCCL broadcasts. The other end is vLLM's own backend ``nccl``, unchanged, and this one is made of vLLM's parts for
it. Which parameters come, and in which order, the controller has told the workers.

A failure leaves the group in a state that nobody knows, so it ends the process.
"""

import socket
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias, assert_never

import torch
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

from staleflow.engines.nccl_messages import Broadcast, Done, Join, Prepare
from staleflow.engines.vllm_checkpoint import published_tensors
from staleflow.process import Parent

ToSender: TypeAlias = Join | Prepare | Broadcast


def session(parent: Parent[ToSender]) -> None:
    """Join, then send whenever told to."""
    tensors: dict[str, torch.Tensor] = {}
    for message in parent:
        match message:
            case Join():
                torch.accelerator.set_device_index(torch.device(message.device))
                port = _free_port(message.address)
                parent.send(Done(port))
                group = trainer_init(
                    {"master_address": message.address, "master_port": port, "world_size": message.world_size}
                )
                packed_bytes, packed_buffers = message.packed_bytes, message.packed_buffers
            case Prepare():
                tensors = published_tensors(Path(message.folder))
            case Broadcast():
                packed_nccl_broadcast_producer(
                    iterator=_on_device(tensors),
                    group=group,
                    src=0,
                    post_iter_func=itemgetter(1),
                    buffer_size_bytes=packed_bytes,
                    num_buffers=packed_buffers,
                )
                # The next version does not wait for the memory of this one.
                tensors = {}
            case _:
                assert_never(message)
        parent.send(Done())


def _on_device(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        yield name, tensor.to(torch.accelerator.current_accelerator(), non_blocking=True)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    Parent.serve(ToSender, session)  # type: ignore[arg-type]
