"""A proxy for tests, which cuts and changes what a server sends."""

import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

Change: TypeAlias = Callable[[int, bytes], bytes]
"""What to pass on of the server's bytes, given the number of the connection; fewer than there are cut it."""


class Proxy:
    """Passes on what ``change`` makes of the server's bytes.

    Args:
        server: address of the server, given the number of the connection.
    """

    def __init__(self, server: Callable[[int], str], change: Change) -> None:
        self.connections = 0
        self._server = server
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        _hang_up(self._listener)
        self._threads[0].join()
        for end in self._sockets:
            _hang_up(end)
        for thread in self._threads[1:]:
            thread.join()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                number = self.connections
                self.connections += 1
                host, _, port = self._server(number).rpartition(":")
                try:
                    far = socket.create_connection((host, int(port)))
                except ConnectionError:
                    _hang_up(near)
                    continue
                self._sockets.append(far)
                self._start(near, far, lambda data: data)
                self._start(far, near, functools.partial(self._change, number))

    def _start(self, source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
        self._threads.append(threading.Thread(target=_pump, args=(source, sink, change)))
        self._threads[-1].start()


def _pump(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            changed = change(data)
            sink.sendall(changed)
            if len(changed) < len(data):
                break
    _hang_up(source)
    _hang_up(sink)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(server: str | Callable[[int], str], change: Change = lambda number, data: data) -> Iterator[Proxy]:
    proxy = Proxy((lambda number: server) if isinstance(server, str) else server, change)
    try:
        yield proxy
    finally:
        proxy.close()


class Cut:
    """A :data:`Change`: cut the connections for which ``when`` holds after so many bytes."""

    def __init__(self, after_bytes: int, when: Callable[[int], bool]) -> None:
        self.passed: dict[int, int] = {}
        self._after_bytes = after_bytes
        self._when = when

    def __call__(self, number: int, data: bytes) -> bytes:
        before = self.passed.setdefault(number, 0)
        if self._when(number):
            data = data[: max(0, self._after_bytes - before)]
        self.passed[number] += len(data)
        return data


class Damage:
    """A :data:`Change`: damage one byte, the one after so many bytes, of the connections for which ``when`` holds."""

    def __init__(self, after_bytes: int, when: Callable[[int], bool]) -> None:
        self._after_bytes = after_bytes
        self._when = when
        self._passed: dict[int, int] = {}

    def __call__(self, number: int, data: bytes) -> bytes:
        before = self._passed.setdefault(number, 0)
        self._passed[number] += len(data)
        place = self._after_bytes - before
        if self._when(number) and 0 <= place < len(data):
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data
