"""Pull a version from a parameter server on another host: plain blocking code, for the process that needs the weights.

Every chunk is verified where it lands. A connection that breaks, stalls or damages a chunk is made anew and goes
on at that chunk; a pull gives up when it has not got on for some attempts in a row, or when its time is over. What
the server refuses is not tried again.
"""

import itertools
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from staleflow.errors import WeightsError
from staleflow.transfer import mapping, wire

Result = TypeVar("Result")

Progress: TypeAlias = Callable[[int, int], None]
"""Told how many bytes there are now, and of how many."""

ATTEMPTS = 5
FIRST_BACK_OFF_S = 0.05
LONGEST_BACK_OFF_S = 2.0
STALL_S = 30.0


class Memory:
    """Files without a name, in memory of this process.

    The memory stays when the files are replaced, for the next ones of the same sizes: to take a page from the system
    and give it back costs several times what it costs to fill it.
    """

    def __init__(self) -> None:
        self.files: dict[str, memoryview] = {}
        self._spare: list[memoryview] = []

    def create(self, name: str, size_bytes: int) -> memoryview:
        """A file's memory, whatever is in it."""
        fitting = [view for view in self._spare if len(view) == size_bytes]
        if fitting:
            self._spare.remove(fitting[0])
        self.files[name] = fitting[0] if fitting else mapping.anonymous(size_bytes)
        return self.files[name]

    def clear(self) -> None:
        """Give the files up, so that their memory can be used again; nobody may look at them any more."""
        self._spare = list(self.files.values())
        self.files = {}


def pull(
    address: str,
    version: int,
    into: Path | Memory,
    *,
    secret: str,
    streams: int = 2,
    timeout_s: float = 600.0,
    progress: Progress = lambda pulled_bytes, total_bytes: None,
) -> None:
    """Pull all files of a version.

    Args:
        address: ``host:port`` of a :class:`staleflow.parameter_server.tcp.TcpParameterServer`.
        version: a version that can be pulled there.
        into: a folder that does not exist yet and appears when it is complete, or a :class:`Memory`, whose files are
            replaced.
        secret: the server's.
        streams: connections at once.
        timeout_s: after which the pull gives up, however well it gets on.
        progress: called after each chunk, from any thread.

    Raises:
        WeightsError: names the version, the address and why it could not be pulled; nothing is left behind.
    """
    try:
        with _destination(into) as create:
            _Pull(address, version, secret, time.monotonic() + timeout_s, progress).run(create, streams)
    except (OSError, msgspec.MsgspecError, _DamagedChunkError) as error:
        raise WeightsError(f"version {version} could not be pulled from {address}: {error}") from error


class _DamagedChunkError(Exception):
    """A chunk is not what its checksum says."""


Create: TypeAlias = Callable[[str, int], memoryview]
"""Makes a file of a name and a size in bytes; returns the memory that is its contents."""


@contextmanager
def _destination(into: Path | Memory) -> Iterator[Create]:
    """How to create a file; when the block ends, all files are complete or there are none."""
    if isinstance(into, Memory):
        into.clear()
        try:
            yield into.create
        except BaseException:
            into.clear()
            raise
        return
    partial = into.with_name(f"{into.name}.partial")
    partial.mkdir()
    try:
        yield lambda name, size_bytes: mapping.new_file(partial / name, size_bytes)
        partial.rename(into)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Layout:
    """Where the bytes of an offered version are to land."""

    def __init__(self, offer: wire.Offer, create: Create) -> None:
        self.identity = offer.identity
        self.chunks = wire.chunks_of(offer.files, offer.chunk_bytes)
        self.size_bytes = sum(file.size_bytes for file in offer.files)
        self._files = [create(_checked(file), file.size_bytes) for file in offer.files]

    def target(self, number: int) -> memoryview:
        """The memory of a chunk."""
        chunk = self.chunks[number]
        return self._files[chunk.file][chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]


class _Pull:
    """One version on its way, over several connections that share a lease."""

    def __init__(self, address: str, version: int, secret: str, deadline_s: float, progress: Progress) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise WeightsError(f"address {address!r} is not of the form host:port")
        self._host, self._port = host.strip("[]"), int(port)
        self._version = version
        self._secret = secret
        self._deadline_s = deadline_s
        self._progress = progress
        self._lease = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._pulled_bytes = 0
        self._given_up = threading.Event()

    def run(self, create: Create, streams: int) -> None:
        connection, offer = self._persist(self._connect)
        with connection:
            layout = _Layout(offer, create)
            self._progress(0, layout.size_bytes)
            bounds = [len(layout.chunks) * index // streams for index in range(streams + 1)]
            with ThreadPoolExecutor(streams, "weights-stream") as pool:
                pulls = [pool.submit(self._stream, layout, *ends) for ends in itertools.pairwise(bounds)]
            for pulled in pulls:
                pulled.result()
            # Unless it is told so, the server finds out when the lease is over.
            with suppress(OSError):
                wire.send(connection, wire.Done())

    def _stream(self, layout: _Layout, first: int, end: int) -> None:
        """Pull the chunks from ``first`` to before ``end``, over as many connections as it takes."""
        done = first

        def go_on() -> None:
            nonlocal done
            connection, offer = self._connect()
            with connection:
                if offer.identity != layout.identity:
                    raise WeightsError(f"version {self._version} was replaced while it was pulled")
                wire.send(connection, wire.Want(done, end))
                while done < end:
                    self._receive_chunk(connection, layout, done)
                    done += 1

        try:
            if first < end:
                self._persist(go_on, lambda: done)
        except BaseException:
            self._given_up.set()
            raise

    def _receive_chunk(self, connection: socket.socket, layout: _Layout, number: int) -> None:
        target = layout.target(number)
        (expected,) = wire.CHECKSUM.unpack(wire.receive_exactly(connection, wire.CHECKSUM.size))
        wire.receive_into(connection, target)
        if wire.checksum(target) != expected:
            raise _DamagedChunkError(f"chunk {number} of {len(layout.chunks)} arrived damaged")
        with self._lock:
            self._pulled_bytes += len(target)
            self._progress(self._pulled_bytes, layout.size_bytes)
        if self._given_up.is_set() or time.monotonic() > self._deadline_s:
            raise WeightsError(f"version {self._version} was given up after {self._pulled_bytes} bytes")

    def _persist(self, attempt: Callable[[], Result], position: Callable[[], int] = lambda: 0) -> Result:
        """Try until it works, or until it has failed :data:`ATTEMPTS` times in a row at the same position."""
        failures, reached = 0, position()
        while True:
            try:
                return attempt()
            except (OSError, msgspec.MsgspecError, _DamagedChunkError):
                failures = failures + 1 if position() == reached else 1
                reached = position()
                back_off_s = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2**failures)
                if failures == ATTEMPTS or self._given_up.wait(back_off_s):
                    raise

    def _connect(self) -> tuple[socket.socket, wire.Offer]:
        """A connection on which chunks can be asked for."""
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise WeightsError(f"version {self._version} could not be pulled in time")
        limit_s = min(STALL_S, remaining_s)
        connection = socket.create_connection((self._host, self._port), timeout=limit_s)
        wire.limit_waits(connection, limit_s)
        try:
            return connection, self._ask(connection)
        except BaseException:
            connection.close()
            raise

    def _ask(self, connection: socket.socket) -> wire.Offer:
        decoder = msgspec.msgpack.Decoder(wire.FromServer)
        hello = wire.receive(connection, decoder)
        if not isinstance(hello, wire.Hello) or hello.protocol != wire.PROTOCOL:
            raise WeightsError(f"{self._host}:{self._port} does not speak protocol {wire.PROTOCOL} of staleflow")
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        proof = wire.proof(self._secret, "puller", hello.nonce)
        wire.send(connection, wire.Ask(self._version, self._lease, nonce, proof))
        offer = wire.receive(connection, decoder)
        if isinstance(offer, wire.Refused):
            raise WeightsError(f"{self._host}:{self._port} refuses version {self._version}: {offer.reason}")
        if not isinstance(offer, wire.Offer) or offer.proof != wire.proof(self._secret, "server", nonce):
            raise WeightsError(f"{self._host}:{self._port} does not know the secret")
        return offer


def _checked(file: wire.File) -> str:
    if Path(file.name).name != file.name or file.size_bytes < 0:
        raise WeightsError(f"the server offers a file {file.name!r} of {file.size_bytes} bytes")
    return file.name
