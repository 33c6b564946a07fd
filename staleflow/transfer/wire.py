"""What goes over the wire when a version is pulled from another host, and in which pieces.

::

    puller                                  parameter server
      <------------------------------------ Hello(nonce)
      Ask(version, proof, nonce) ---------->
      <------------------------------------ Offer(files, proof)  or  Refused(reason)
      Want(first, end) -------------------->
      <------------------------------------ checksum, bytes; checksum, bytes; ...      one pair per chunk
      Done() ------------------------------>

Messages are msgspec structs in length-prefixed msgpack. The chunks of a version are those of its files one after the
other, numbered through; a pull that was broken off goes on at the first chunk it has not got. Both sides prove that
they know the secret without sending it. Weights themselves are neither encrypted nor signed: checksums find
damage, not malice.
"""

import hashlib
import hmac
import socket
import struct
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

Message = TypeVar("Message")

PROTOCOL = 1
NONCE_BYTES = 16
FRAME_BYTES_MAX = 1 << 20
CHECKSUM = struct.Struct("<Q")


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The server speaks first: its nonce is what the puller has to sign."""

    protocol: int
    nonce: bytes


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Which version; all connections of one pull share the name ``lease``."""

    version: int
    lease: str
    nonce: bytes
    proof: bytes


class File(msgspec.Struct, frozen=True):
    """One file of a version."""

    name: str
    size_bytes: int


class Offer(msgspec.Struct, tag=True, frozen=True):
    """The version's files. ``identity`` tells it from any other of the same number, as after a restart."""

    identity: str
    files: tuple[File, ...]
    chunk_bytes: int
    proof: bytes


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Asking again will not help."""

    reason: str


class Want(msgspec.Struct, tag=True, frozen=True):
    """Send the chunks from ``first`` to before ``end``."""

    first: int
    end: int


class Done(msgspec.Struct, tag=True, frozen=True):
    """The pull is over; the version need not be kept for it."""


FromServer: TypeAlias = Hello | Offer | Refused
FromPuller: TypeAlias = Ask | Want | Done


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive bytes of one file, given by its place in the offer."""

    file: int
    offset_bytes: int
    size_bytes: int


def chunks_of(files: tuple[File, ...], chunk_bytes: int) -> list[Chunk]:
    """The chunks of a version in the order of their numbers."""
    return [
        Chunk(index, offset, min(chunk_bytes, file.size_bytes - offset))
        for index, file in enumerate(files)
        for offset in range(0, file.size_bytes, chunk_bytes)
    ]


def checksum(data: memoryview) -> int:
    """64 bits of XXH3; the interpreter lock is released meanwhile."""
    return xxhash.xxh3_64_intdigest(data)


def proof(secret: str, role: str, nonce: bytes) -> bytes:
    """What only one who knows the secret can say; ``role`` keeps either side from echoing the other's."""
    return hmac.new(secret.encode(), role.encode() + nonce, hashlib.sha256).digest()


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Write one message."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(len(body).to_bytes(4, "little") + body)


def receive(connection: socket.socket, decoder: "msgspec.msgpack.Decoder[Message]") -> Message:
    """Read one message. Raises ``ConnectionError`` at the end of the stream, ``msgspec.MsgspecError`` for nonsense."""
    body_bytes = int.from_bytes(receive_exactly(connection, 4), "little")
    if body_bytes > FRAME_BYTES_MAX:
        raise msgspec.DecodeError(f"a message of {body_bytes} bytes is announced; {FRAME_BYTES_MAX} are allowed")
    return decoder.decode(receive_exactly(connection, body_bytes))


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Read so many bytes; raises ``ConnectionError`` if the stream ends before."""
    data = bytearray(size_bytes)
    receive_into(connection, memoryview(data))
    return bytes(data)


def limit_waits(connection: socket.socket, limit_s: float) -> None:
    """Let the kernel end any wait on the connection, so that one call can wait for a whole chunk."""
    limit = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1_000_000))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``. Raises ``ConnectionError`` if the stream ends before, ``TimeoutError`` if it stalls."""
    while target:
        try:
            # Each call may wait for the interpreter lock, of which a busy process gives little: one call for all.
            received_bytes = connection.recv_into(target, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("nothing has arrived for too long") from None
        if received_bytes == 0:
            raise ConnectionError("the connection was closed by the other side")
        target = target[received_bytes:]
