"""What the controller and a sender of weights say to each other; see ``nccl_sender``."""

import msgspec


class Join(msgspec.Struct, tag=True, frozen=True):
    """Meet a server's workers at an address of this host, as the first of ``world_size``; answered twice, first with
    the port to meet at."""

    address: str
    device: str
    world_size: int
    packed_bytes: int
    packed_buffers: int


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Have all parameters in a folder at hand, in the order of its files' headers."""

    folder: str


class Broadcast(msgspec.Struct, tag=True, frozen=True):
    """Send what was prepared."""


class Done(msgspec.Struct, frozen=True):
    """It is done. What fails ends the process."""

    port: int = 0
