"""Pulls over TCP, through a proxy that cuts, corrupts and delays."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from staleflow.errors import ConfigError, WeightsError
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.parameter_server.tcp import TcpParameterServer
from staleflow.transfer.client import ATTEMPTS, Memory, pull

SECRET = "a secret of the test"
CHUNK_BYTES = 1000
FILES = {"a.safetensors": os.urandom(3500), "b.safetensors": os.urandom(2000), "empty.safetensors": b""}
CHUNKS = 6


@pytest.fixture
def weights(tmp_path: Path) -> SharedMemoryParameterServer:
    return SharedMemoryParameterServer(tmp_path)


@pytest.fixture
def server(weights: SharedMemoryParameterServer) -> Iterator[TcpParameterServer]:
    server = TcpParameterServer("127.0.0.1", secret=SECRET, weights=weights, chunk_bytes=CHUNK_BYTES)
    yield server
    server.close()


def publish(server: TcpParameterServer, version: int, files: dict[str, bytes] = FILES) -> None:
    with server.publishing(version) as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


Change = Callable[[int, bytes], bytes | None]
"""What to pass on of the server's bytes, given the connection's number and the bytes; None: cut the connection."""


@contextmanager
def proxied(server: TcpParameterServer, change: Change) -> Iterator[str]:
    """The address of a proxy before ``server``, which passes on what ``change`` makes of the server's bytes."""
    host, _, port = server.address.rpartition(":")
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        threads: list[threading.Thread] = []

        def pump(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes | None]) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    changed = change(data)
                    if changed is None:
                        break
                    sink.sendall(changed)
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            number = 0
            with suppress(OSError):
                while True:
                    near = stack.enter_context(listener.accept()[0])
                    far = stack.enter_context(socket.create_connection((host, int(port))))
                    start(pump, near, far, lambda data: data)
                    start(pump, far, near, lambda data, number=number: change(number, data))
                    number += 1

        def start(target: Callable[..., None], *args: object) -> None:
            thread = threading.Thread(target=target, args=args)
            threads.append(thread)
            thread.start()

        start(accept)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        threads[0].join()
        for connection in stack._exit_callbacks and []:
            del connection
    for thread in threads:
        thread.join(timeout=10)


class Cut:
    """Cut each data connection once it has passed on so many bytes."""

    def __init__(self, after_bytes: int) -> None:
        self.after_bytes = after_bytes
        self.passed: dict[int, int] = {}

    def __call__(self, number: int, data: bytes) -> bytes | None:
        before = self.passed.setdefault(number, 0)
        self.passed[number] += len(data)
        if number in (1, 2) and self.passed[number] > self.after_bytes:
            return data[: max(0, self.after_bytes - before)] or None
        return data


def test_a_pulled_version_is_what_was_published(server: TcpParameterServer, tmp_path: Path) -> None:
    publish(server, 1)
    steps: list[tuple[int, int]] = []
    pull(server.address, 1, tmp_path / "here", secret=SECRET, progress=lambda *step: steps.append(step))
    assert contents(tmp_path / "here") == FILES
    assert steps[0] == (0, 5500)
    assert steps[-1] == (5500, 5500)


def test_a_version_is_pulled_into_memory_without_a_name(server: TcpParameterServer) -> None:
    publish(server, 1)
    memory = Memory()
    pull(server.address, 1, memory, secret=SECRET)
    assert {name: path.read_bytes() for name, path in memory.paths.items()} == FILES
    memory.close()
    memory.close()
    assert memory.paths == {}
