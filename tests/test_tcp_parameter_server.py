"""Weights over TCP. The proxy's connection 0 is the one that holds the lease; those after it carry chunks."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from network import Cut, Damage, proxied

from staleflow.errors import ConfigError, WeightsError
from staleflow.parameter_server import tcp
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.parameter_server.tcp import TcpParameterServer
from staleflow.transfer import client, wire
from staleflow.transfer.client import ATTEMPTS, Memory, pull

SECRET = "a secret of the test"
CHUNK_BYTES = 1000
SENT_BYTES = CHUNK_BYTES + wire.CHECKSUM.size
CHUNKS = 8
FILES = {"a.safetensors": os.urandom(3000), "b.safetensors": os.urandom(5000), "empty.safetensors": b""}
PATIENCE_S = 30.0


class Weights(SharedMemoryParameterServer):
    """Says when a pull of it has ended; ``pullers`` begin together."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pullers = threading.Barrier(1)
        self.released = threading.Event()

    @contextmanager
    def pulling(self, version: int) -> Iterator[Path]:
        with super().pulling(version) as folder:
            self.pullers.wait(PATIENCE_S)
            yield folder
        self.released.set()


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_BACK_OFF_S", 0.0)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    (tmp_path / "shm").mkdir()
    weights = Weights(tmp_path / "shm")
    yield weights
    weights.close()


@pytest.fixture
def server(weights: Weights) -> Iterator[TcpParameterServer]:
    server = TcpParameterServer("127.0.0.1", secret=SECRET, weights=weights, chunk_bytes=CHUNK_BYTES)
    yield server
    server.close()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def publish(server: TcpParameterServer, version: int, files: dict[str, bytes] = FILES) -> None:
    with server.publishing(version) as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def quiet_puller(server: TcpParameterServer, *messages: msgspec.Struct) -> Iterator[socket.socket]:
    """Ask for version 1, send ``messages`` and then neither read nor write."""
    host, _, port = server.address.rpartition(":")
    decoder = msgspec.msgpack.Decoder(wire.FromServer)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        hello = wire.receive(connection, decoder)
        assert isinstance(hello, wire.Hello)
        wire.send(connection, wire.Ask(1, "quiet", b"nonce", wire.proof(SECRET, "puller", hello.nonce)))
        assert isinstance(wire.receive(connection, decoder), wire.Offer)
        for message in messages:
            wire.send(connection, message)
        yield connection


def handshake_bytes(server: TcpParameterServer, here: Path) -> int:
    """What the server sends on a connection before the first chunk."""
    counted = Cut(0, lambda number: False)
    with proxied(server.address, counted) as proxy:
        pull(proxy.address, 1, here.with_name("counted"), secret=SECRET, streams=1)
    assert counted.passed[1] == counted.passed[0] + CHUNKS * SENT_BYTES
    return counted.passed[0]


def test_a_pulled_version_is_what_was_published(server: TcpParameterServer, here: Path) -> None:
    publish(server, 1)
    steps: list[tuple[int, int]] = []
    pull(server.address, 1, here, secret=SECRET, progress=lambda *step: steps.append(step))
    assert contents(here) == FILES
    assert steps == [(CHUNK_BYTES * chunk, 8000) for chunk in range(CHUNKS + 1)]


def test_memory_is_used_again_for_the_next_version(server: TcpParameterServer) -> None:
    publish(server, 1)
    publish(server, 2, {name: bytes(len(data)) for name, data in FILES.items()})
    memory = Memory()
    pull(server.address, 1, memory, secret=SECRET)
    assert {name: bytes(view) for name, view in memory.files.items()} == FILES
    before = {id(view.obj) for view in memory.files.values() if len(view)}
    pull(server.address, 2, memory, secret=SECRET)
    assert {name: bytes(view) for name, view in memory.files.items()} == {n: bytes(len(d)) for n, d in FILES.items()}
    assert {id(view.obj) for view in memory.files.values() if len(view)} == before


def test_memory_holds_no_files_after_a_pull_that_failed(server: TcpParameterServer) -> None:
    publish(server, 1)
    memory = Memory()
    pull(server.address, 1, memory, secret=SECRET)
    with pytest.raises(WeightsError):
        pull(server.address, 7, memory, secret=SECRET)
    assert memory.files == {}


@pytest.mark.parametrize("streams", [1, 3, 20])
def test_any_number_of_streams_pulls_the_same(server: TcpParameterServer, here: Path, streams: int) -> None:
    publish(server, 1)
    pull(server.address, 1, here, secret=SECRET, streams=streams)
    assert contents(here) == FILES


def test_several_versions_stay_pullable_by_several_pullers(server: TcpParameterServer, here: Path) -> None:
    for version in (1, 2):
        publish(server, version, {"a.safetensors": bytes([version]) * 5000})
    with ThreadPoolExecutor() as pool:
        pulls = [
            pool.submit(pull, server.address, version, here.with_name(f"{version}-{puller}"), secret=SECRET)
            for version in (1, 2)
            for puller in range(2)
        ]
    for pulled in pulls:
        pulled.result()
    for version in (1, 2):
        for puller in range(2):
            assert contents(here.with_name(f"{version}-{puller}")) == {"a.safetensors": bytes([version]) * 5000}


def test_pull_goes_on_at_the_chunk_at_which_its_connection_was_cut(server: TcpParameterServer, here: Path) -> None:
    publish(server, 1)
    handshake = handshake_bytes(server, here)
    for chunk in range(CHUNKS):
        cut = Cut(handshake + chunk * SENT_BYTES + 500, lambda number: number == 1)
        with proxied(server.address, cut) as proxy:
            pull(proxy.address, 1, here.with_name(f"cut-{chunk}"), secret=SECRET, streams=1)
            assert proxy.connections == 3
        assert contents(here.with_name(f"cut-{chunk}")) == FILES
        assert cut.passed[2] == handshake + (CHUNKS - chunk) * SENT_BYTES


def test_pull_that_gets_on_by_one_chunk_at_a_time_is_never_given_up(server: TcpParameterServer, here: Path) -> None:
    publish(server, 1)
    cut = Cut(handshake_bytes(server, here) + SENT_BYTES, lambda number: number >= 1)
    with proxied(server.address, cut) as proxy:
        pull(proxy.address, 1, here, secret=SECRET, streams=1)
        assert proxy.connections == 1 + CHUNKS > ATTEMPTS
    assert contents(here) == FILES


def test_damaged_chunk_is_pulled_again(server: TcpParameterServer, here: Path) -> None:
    publish(server, 1)
    damage = Damage(handshake_bytes(server, here) + 3 * SENT_BYTES + 500, lambda number: number == 1)
    with proxied(server.address, damage) as proxy:
        pull(proxy.address, 1, here, secret=SECRET, streams=1)
    assert contents(here) == FILES


def test_pull_is_given_up_when_the_same_chunk_is_always_damaged(server: TcpParameterServer, here: Path) -> None:
    publish(server, 1)
    damage = Damage(handshake_bytes(server, here) + 500, lambda number: number >= 1)
    with (
        proxied(server.address, damage) as proxy,
        pytest.raises(WeightsError, match=r"version 1 could not be pulled from .*: chunk 0 of 8 arrived damaged"),
    ):
        pull(proxy.address, 1, here, secret=SECRET, streams=1)
    assert proxy.connections == 1 + ATTEMPTS
    assert not here.exists()
    assert not here.with_name("here.partial").exists()


def test_pull_is_given_up_when_there_is_no_server(here: Path, unused_port: int) -> None:
    with pytest.raises(WeightsError, match=f"127.0.0.1:{unused_port}: .*refused"):
        pull(f"127.0.0.1:{unused_port}", 1, here, secret=SECRET)


def test_pull_ends_with_its_time(server: TcpParameterServer, here: Path) -> None:
    publish(server, 1)
    with pytest.raises(WeightsError, match="could not be pulled in time"):
        pull(server.address, 1, here, secret=SECRET, timeout_s=0.0)


def test_version_that_was_replaced_meanwhile_is_refused(
    server: TcpParameterServer, weights: Weights, here: Path, tmp_path: Path
) -> None:
    publish(server, 1)
    (tmp_path / "other").mkdir()
    other = TcpParameterServer(
        "127.0.0.1", secret=SECRET, weights=SharedMemoryParameterServer(tmp_path / "other"), chunk_bytes=CHUNK_BYTES
    )
    publish(other, 1, {name: bytes(len(data)) for name, data in FILES.items()})
    with (
        proxied(lambda number: (server if number == 0 else other).address) as proxy,
        pytest.raises(WeightsError, match="version 1 was replaced while it was pulled"),
    ):
        pull(proxy.address, 1, here, secret=SECRET)
    other.close()
    assert not here.exists()


@pytest.mark.parametrize(
    ("version", "secret", "message"),
    [(7, SECRET, r"refuses version 7: .* versions \[1\] can"), (1, "wrong", "refuses version 1: wrong secret")],
)
def test_refusal_is_not_tried_again(
    server: TcpParameterServer, here: Path, version: int, secret: str, message: str
) -> None:
    publish(server, 1)
    with proxied(server.address) as proxy:
        with pytest.raises(WeightsError, match=message):
            pull(proxy.address, version, here, secret=secret)
        assert proxy.connections == 1
    assert not here.exists()


def test_server_that_does_not_know_the_secret_is_refused(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                wire.send(connection, wire.Hello(wire.PROTOCOL, b"nonce"))
                ask = wire.receive(connection, msgspec.msgpack.Decoder(wire.FromPuller))
                assert isinstance(ask, wire.Ask)
                wire.send(connection, wire.Offer("x", (wire.File("a.safetensors", 1),), 1, ask.proof))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(WeightsError, match="does not know the secret"):
            pull(f"127.0.0.1:{listener.getsockname()[1]}", 1, here, secret=SECRET)
        thread.join()


def test_puller_that_does_not_read_delays_neither_a_publish_nor_another_puller(weights: Weights, here: Path) -> None:
    large = {"a.safetensors": bytes(64 << 20)}
    server = TcpParameterServer("127.0.0.1", secret=SECRET, weights=weights)
    publish(server, 1, large)
    with quiet_puller(server, wire.Want(0, 8)) as connection:
        # Once something has arrived the server is at it, and the rest does not fit into the socket's buffers.
        assert connection.recv(1)
        for version in (2, 3, 4):
            publish(server, version, large)
        pull(server.address, 4, here, secret=SECRET)
        assert contents(here) == large
        assert weights.versions == (1, 3, 4)
        server.close()


def test_connections_of_one_pull_that_ask_at_once_share_its_lease(server: TcpParameterServer, weights: Weights) -> None:
    publish(server, 1)
    weights.pullers = threading.Barrier(2)

    def pull_one_chunk() -> bytes:
        with quiet_puller(server, wire.Want(0, 1)) as connection:
            sent = bytearray(SENT_BYTES)
            wire.receive_into(connection, memoryview(sent))
            return bytes(sent)

    with ThreadPoolExecutor() as pool:
        one, other = (pulled.result() for pulled in [pool.submit(pull_one_chunk) for _ in range(2)])
    assert one == other
    for version in (2, 3, 4):
        publish(server, version)
    assert weights.versions == (1, 3, 4)


def test_version_is_kept_for_a_puller_whose_connection_broke(server: TcpParameterServer, weights: Weights) -> None:
    publish(server, 1)
    with quiet_puller(server):
        pass
    for version in (2, 3, 4):
        publish(server, version)
    assert weights.versions == (1, 3, 4)


def test_version_is_let_go_when_the_puller_is_done(server: TcpParameterServer, weights: Weights, here: Path) -> None:
    publish(server, 1)
    pull(server.address, 1, here, secret=SECRET)
    assert weights.released.wait(PATIENCE_S)
    for version in (2, 3, 4):
        publish(server, version)
    assert weights.versions == (3, 4)


class Timers:
    """Stands in for :class:`threading.Timer` and for the clock. What was started goes off when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.started: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now_s

    def timer(self, seconds: float, function: Callable[[str], None], arguments: list[str]) -> Any:
        return SimpleNamespace(start=lambda: self.started.append(partial(function, *arguments)), cancel=lambda: None)

    def go_off_at(self, now_s: float) -> None:
        self.now_s = now_s
        self.started.pop()()


def test_version_is_let_go_when_the_lease_of_a_dead_puller_is_over(
    server: TcpParameterServer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = Timers()
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=timers.monotonic))
    monkeypatch.setattr(threading, "Timer", timers.timer)
    publish(server, 1)
    with quiet_puller(server) as connection:
        timers.now_s = 30.0
        with quiet_puller(server, wire.Want(0, 1), wire.Want(1, 0)) as renewing:
            while renewing.recv(SENT_BYTES):
                pass
        timers.go_off_at(60.0)
        for version in (2, 3, 4):
            publish(server, version)
        assert weights.versions == (1, 3, 4)
        timers.go_off_at(90.0)
        assert connection.recv(1) == b""
        publish(server, 5)
        assert list(weights.versions) == [4, 5]


def test_closing_ends_pulls_and_removes_the_weights(weights: Weights, here: Path, tmp_path: Path) -> None:
    server = TcpParameterServer("127.0.0.1", secret=SECRET, weights=weights, chunk_bytes=CHUNK_BYTES)
    publish(server, 1)
    with quiet_puller(server) as connection:
        server.close()
        server.close()
        assert connection.recv(1) == b""
    with pytest.raises(WeightsError):
        pull(server.address, 1, here, secret=SECRET)
    assert list((tmp_path / "shm").iterdir()) == []


def test_nonsense_costs_a_stranger_the_connection_and_nobody_else_anything(
    server: TcpParameterServer, here: Path
) -> None:
    publish(server, 1)
    host, _, port = server.address.rpartition(":")
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            stranger.sendall(nonsense)
            with suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass
    with quiet_puller(server, wire.Want(0, CHUNKS + 1)) as connection:
        assert connection.recv(1) == b""
    pull(server.address, 1, here, secret=SECRET)


def test_puller_without_space_says_so(server: TcpParameterServer, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(server, 1)

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightsError, match=r"version 1 could not be pulled .*No space left on device"):
        pull(server.address, 1, here, secret=SECRET)
    assert not here.with_name("here.partial").exists()


def test_unusable_settings_are_refused(weights: Weights, here: Path) -> None:
    with pytest.raises(ConfigError, match="secret is empty"):
        TcpParameterServer("127.0.0.1", secret="", weights=weights)
    with pytest.raises(ConfigError, match="chunk_bytes is 0"):
        TcpParameterServer("127.0.0.1", secret=SECRET, weights=weights, chunk_bytes=0)
    with pytest.raises(ConfigError, match="lease_s is 0"):
        TcpParameterServer("127.0.0.1", secret=SECRET, weights=weights, lease_s=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            TcpParameterServer("127.0.0.1", port, secret=SECRET, weights=weights)
    with pytest.raises(WeightsError, match="'nowhere' is not of the form host:port"):
        pull("nowhere", 1, here, secret=SECRET)
