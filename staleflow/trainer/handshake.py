"""How a rank on another machine and the controller prove to each other that they know the same secret.

::

    controller -> rank   Challenge(nonce)
    rank -> controller   Hello(rank, size, its own nonce, proof)
    controller -> rank   Welcome(proof)

A proof is an HMAC-SHA256 over who gives it, both nonces, rank and size, so that none can be used twice or by the other
side. The rank asks for one too: what the controller sends it names modules to import and files to write.
"""

import hashlib
import hmac
import os
import secrets
import socket
import time
from typing import Literal, TypeVar

import msgspec

from staleflow.errors import ConfigError, TrainerError
from staleflow.process import frame

SECRET_VARIABLE = "STALEFLOW_TRAINER_SECRET"
SHORTEST_SECRET = 16
LONGEST_MESSAGE_BYTES = 1024
HANDSHAKE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 600.0
RETRY_S = 1.0
KEEP_ALIVE_IDLE_S = 10
KEEP_ALIVE_INTERVAL_S = 5
KEEP_ALIVE_PROBES = 4

Received = TypeVar("Received", bound=msgspec.Struct)


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """Prove that you know the secret."""

    nonce: bytes


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The proof of rank number ``rank`` of ``size``."""

    rank: int
    size: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The proof of the controller."""

    proof: bytes


def shared_secret() -> bytes:
    """From the environment; raises :class:`ConfigError` when it is missing or could be guessed."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the environment variable {SECRET_VARIABLE} has {len(secret)} characters; give the controller and all "
            f"ranks the same secret of at least {SHORTEST_SECRET}"
        )
    return secret.encode()


def challenge() -> Challenge:
    """One that was never asked before."""
    return Challenge(secrets.token_bytes(32))


def hello(secret: bytes, challenge: Challenge, rank: int, size: int) -> Hello:
    """The answer to a challenge."""
    nonce = secrets.token_bytes(32)
    return Hello(rank, size, nonce, _proof(secret, "rank", challenge.nonce, nonce, rank, size))


def welcome(secret: bytes, challenge: Challenge, answer: Hello) -> Welcome | None:
    """The controller's proof in return; None for an answer of someone who does not know the secret."""
    expected = _proof(secret, "rank", challenge.nonce, answer.nonce, answer.rank, answer.size)
    if not hmac.compare_digest(expected, answer.proof):
        return None
    return Welcome(_proof(secret, "controller", challenge.nonce, answer.nonce, answer.rank, answer.size))


def is_welcome(secret: bytes, challenge: Challenge, answer: Hello, said: Welcome) -> bool:
    """Whether it was the controller who said it."""
    expected = _proof(secret, "controller", challenge.nonce, answer.nonce, answer.rank, answer.size)
    return hmac.compare_digest(expected, said.proof)


def connect(address: str, rank: int, size: int) -> socket.socket:
    """A rank's connection to the controller at ``"host:port"``, which may start after it; both have proven themselves.

    Raises :class:`ConfigError` for an address that is none, :class:`TrainerError` for a controller that is not there or
    does not know the secret.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"the controller's address is {address!r}; it must be 'host:port'")
    secret = shared_secret()
    connection = _reached(host.strip("[]"), int(port))
    try:
        asked = _received(connection, Challenge)
        answer = hello(secret, asked, rank, size)
        connection.sendall(frame(answer))
        known = is_welcome(secret, asked, answer, _received(connection, Welcome))
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        connection.close()
        raise TrainerError(f"{address} did not let rank {rank} in: {error} (is {SECRET_VARIABLE} the same?)") from error
    if not known:
        connection.close()
        raise TrainerError(f"{address} does not know the secret in {SECRET_VARIABLE}")
    keep_alive(connection)
    connection.settimeout(None)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that the other machine is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_ALIVE_PROBES)


def _reached(host: str, port: int) -> socket.socket:
    ends_s = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT_S)
        except OSError as error:
            if time.monotonic() > ends_s:
                raise TrainerError(f"no controller at {host}:{port} within {CONNECT_TIMEOUT_S:.0f} s") from error
        time.sleep(RETRY_S)


def _received(connection: socket.socket, kind: type[Received]) -> Received:
    size_bytes = int.from_bytes(_exactly(connection, 4), "little")
    if size_bytes > LONGEST_MESSAGE_BYTES:
        raise EOFError(f"it sent a message of {size_bytes} bytes")
    return msgspec.msgpack.decode(_exactly(connection, size_bytes), type=kind)


def _exactly(connection: socket.socket, count_bytes: int) -> bytes:
    data = b""
    while len(data) < count_bytes:
        part = connection.recv(count_bytes - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return data


def _proof(
    secret: bytes, by: Literal["rank", "controller"], challenge: bytes, nonce: bytes, rank: int, size: int
) -> bytes:
    return hmac.digest(secret, msgspec.msgpack.encode((by, challenge, nonce, rank, size)), hashlib.sha256)
