"""One model on several ranks: each keeps a part of it (FSDP2), or each keeps all and gradients are summed.

What differs between the two is in here; the learner only asks for a gradient, a norm or a whole parameter.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from staleflow.trainer.world import World


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, in which nearly all of a model is."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: nn.Module) -> None:
    """Keep only what goes into each layer for the backward pass. transformers' own way needs dropout to be on."""
    for layer in layers(model):
        # Beneath the hooks of FSDP, which must not run again in the backward pass.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def why_not_sharded(world: World) -> str | None:
    """What keeps FSDP2 from running here, found out with a single layer; None if nothing does. A collective."""
    layer = nn.Linear(world.size, world.size).to(world.device)
    error = None
    try:
        shard(layer, world)
        layer(torch.ones(1, world.size, device=world.device)).sum().backward()
    except (RuntimeError, NotImplementedError, AttributeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    failed = world.sum(torch.tensor(float(error is not None)))
    return None if not failed else error or "it fails in another rank"


def shard(model: nn.Module, world: World) -> None:
    """Keep this rank's part of every parameter, on its device; gradients are sums over ranks."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in [*layers(model), model]:
        sharded = fully_shard(module, mesh=mesh)
        # The loss of an update is a sum over its sequences, wherever they are. Means are also more than gloo can do.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def part_again(model: nn.Module) -> None:
    """After passes without a backward one: FSDP keeps what is outside the layers whole until that has come."""
    if isinstance(model, FSDPModule):
        model.reshard()


def sum_gradients(model: nn.Module, world: World) -> None:
    """Make the gradients those of all ranks; FSDP has done so in the backward pass."""
    if world.size == 1 or isinstance(model, FSDPModule):
        return
    parameters = list(model.parameters())
    # A rank without sequences has no gradients; a parameter that no rank has used must not get one.
    used = world.sum(torch.tensor([float(parameter.grad is not None) for parameter in parameters]))
    for parameter, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            world.sum(parameter.grad)


def gradient_norm(model: nn.Module, world: World) -> Tensor:
    """Of all parameters on all ranks, with the same bits on all of them."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return world.as_first(whole(torch.nn.utils.get_total_norm(gradients)))


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this rank may have only a part. A collective if so."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
