"""Published versions for engines on other hosts: the versions in shared memory, served in chunks over TCP.

The controller's event loop is not involved: each connection has a thread of its own, which sends straight from
the files. No lock is held while anything is sent, so a slow or dead puller delays neither a publish nor another puller.

Invariant: a version stays pullable while a *lease* on it lasts. All connections of one pull share a lease. It is
renewed with every chunk that has gone out, outlives a broken connection, and ends when the puller says so or when no
chunk has gone out for ``lease_s``; connections that still use it are then closed.
"""

import hmac
import secrets
import socket
import threading
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from staleflow.errors import ConfigError
from staleflow.parameter_server.base import ParameterServer
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.transfer import mapping, wire

CONNECTIONS_MAX = 256


class TcpParameterServer:
    """A parameter server that also serves its versions to other hosts; see ``staleflow.transfer``.

    Args:
        host: address to listen on, the one by which engines reach this host; ``0.0.0.0`` for all.
        port: to listen on; 0 for any free one, see ``address``, the ``host:port`` for pullers.
        secret: that pullers must know; engines take it from ``$STALEFLOW_SECRET``.
        weights: where the versions are; its ``pulling`` must work from any thread. Default: in shared memory.
        chunk_bytes: what is checked, and repeated if damaged, at a time.
        lease_s: how long a version is kept for a pull that does not get on.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        secret: str,
        weights: ParameterServer | None = None,
        chunk_bytes: int = 8 << 20,
        lease_s: float = 60.0,
    ) -> None:
        if not secret:
            raise ConfigError("secret is empty; every puller must prove that it knows one")
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes is {chunk_bytes}; it must be at least 1")
        if lease_s <= 0:
            raise ConfigError(f"lease_s is {lease_s}; it must be above 0")
        try:
            self._listener = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise ConfigError(f"the parameter server cannot listen on {host}:{port}: {error}") from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._secret = secret
        self._weights = SharedMemoryParameterServer() if weights is None else weights
        self._chunk_bytes = chunk_bytes
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="weights-accept", daemon=True).start()

    def publishing(self, version: int) -> AbstractContextManager[Path]:
        """See :class:`staleflow.parameter_server.base.ParameterServer`."""
        return self._weights.publishing(version)

    def pulling(self, version: int) -> AbstractContextManager[Path]:
        """See :class:`staleflow.parameter_server.base.ParameterServer`; for engines on this host."""
        return self._weights.pulling(version)

    def close(self) -> None:
        """Break off what is being pulled and discard everything. Idempotent."""
        with self._lock:
            self._closed = True
            leases = list(self._leases)
            for connection in self._connections:
                _hang_up(connection)
        _hang_up(self._listener)
        self._listener.close()
        for lease in leases:
            self._end_lease(lease)
        self._weights.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # Out of descriptors, or the puller has already gone.
                time.sleep(0.01)
                continue
            with self._lock:
                if self._closed or len(self._connections) >= CONNECTIONS_MAX:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="weights-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection's life. A puller that goes away or talks nonsense loses its connection and no more."""
        connection.settimeout(self._lease_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with suppress(OSError, msgspec.MsgspecError):
                self._answer(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        decoder = msgspec.msgpack.Decoder(wire.FromPuller)
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        wire.send(connection, wire.Hello(wire.PROTOCOL, nonce))
        ask = wire.receive(connection, decoder)
        if not isinstance(ask, wire.Ask):
            return
        if not hmac.compare_digest(ask.proof, wire.proof(self._secret, "puller", nonce)):
            wire.send(connection, wire.Refused("wrong secret"))
            return
        try:
            lease = self._join_lease(ask, connection)
        except KeyError as error:
            wire.send(connection, wire.Refused(str(error.args[0])))
            return
        contents = lease.contents
        proof = wire.proof(self._secret, "server", ask.nonce)
        wire.send(connection, wire.Offer(contents.identity, contents.files, self._chunk_bytes, proof))
        while True:
            match wire.receive(connection, decoder):
                case wire.Want(first, end) if 0 <= first <= end <= len(contents.chunks):
                    for number in range(first, end):
                        contents.send(connection, number)
                        lease.expires_s = time.monotonic() + self._lease_s
                case wire.Done():
                    self._end_lease(ask.lease)
                    return
                case _:
                    return

    def _join_lease(self, ask: wire.Ask, connection: socket.socket) -> "_Lease":
        """The lease of this name, made if need be. Raises ``KeyError`` when the version cannot be pulled."""
        with self._lock:
            lease = self._joined(ask, connection)
        if lease is not None:
            return lease
        with ExitStack() as hold:
            folder = hold.enter_context(self._weights.pulling(ask.version))
            with self._lock:
                others = [other.contents for other in self._leases.values() if other.version == ask.version]
            contents = others[0] if others else _Contents(folder, self._chunk_bytes)
            with self._lock:
                if self._closed:
                    raise KeyError("the parameter server is closed")
                # Another connection of the same pull may have been faster.
                lease = self._joined(ask, connection)
                if lease is not None:
                    return lease
                expires_s = time.monotonic() + self._lease_s
                lease = _Lease(ask.version, contents, expires_s, [connection], hold.pop_all())
                self._leases[ask.lease] = lease
        self._watch(ask.lease)
        return lease

    def _joined(self, ask: wire.Ask, connection: socket.socket) -> "_Lease | None":
        """The lease of this name, with the connection on it; None if there is none yet. The lock is held."""
        lease = self._leases.get(ask.lease)
        if lease is None:
            return None
        if lease.version != ask.version:
            raise KeyError(f"lease {ask.lease} is on version {lease.version}")
        lease.connections.append(connection)
        return lease

    def _watch(self, name: str) -> None:
        """End the lease when it has expired; until then look again when it might have."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is None:
                return
            remaining_s = lease.expires_s - time.monotonic()
            if remaining_s > 0:
                lease.timer = threading.Timer(remaining_s, self._watch, [name])
                lease.timer.daemon = True
                lease.timer.start()
                return
        self._end_lease(name)

    def _end_lease(self, name: str) -> None:
        with self._lock:
            lease = self._leases.pop(name, None)
            if lease is None:
                return
            if lease.timer is not None:
                lease.timer.cancel()
            for connection in lease.connections:
                if connection in self._connections:
                    _hang_up(connection)
        lease.hold.close()


class _Contents:
    """The files of one version, in chunks; shared by all who pull it at the same time."""

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        status = folder.stat()
        self.identity = f"{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}"
        self.files = tuple(wire.File(path.name, path.stat().st_size) for path in paths)
        self.chunks = wire.chunks_of(self.files, chunk_bytes)
        self._data = [mapping.published_file(path) for path in paths]
        self._checksums: list[int | None] = [None] * len(self.chunks)

    def send(self, connection: socket.socket, number: int) -> None:
        """Send one chunk and its checksum."""
        chunk = self.chunks[number]
        data = self._data[chunk.file][chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]
        checksum = self._checksums[number]
        if checksum is None:
            checksum = self._checksums[number] = wire.checksum(data)
        connection.sendall(wire.CHECKSUM.pack(checksum))
        connection.sendall(data)


@dataclass
class _Lease:
    """What keeps a version while it is pulled."""

    version: int
    contents: _Contents
    expires_s: float
    connections: list[socket.socket]
    hold: ExitStack
    timer: threading.Timer | None = None


def _hang_up(connection: socket.socket) -> None:
    """Wake whoever waits on it, in whichever thread."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
