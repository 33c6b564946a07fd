"""Child processes that cannot be lost: one socket is the wire, the death notice and the leash.

Parent and child share a socket pair. Messages are length-prefixed msgpack. When the child dies, the parent reads
the end of the stream and raises an error with the last lines of the child's log. When the parent dies, however
suddenly, the kernel closes its end, the child reads the end of the stream and exits.

The first half of this file runs in the controller (:class:`Wire`, :class:`Child`), the second in the child
(:class:`Parent`); neither knows what the messages mean.
"""

import asyncio
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import msgspec

from staleflow.errors import ChildError

Received = TypeVar("Received")

STOP_GRACE_S = 5.0
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 8192
CHILD_NICENESS = 10


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over a wire."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


class Wire(Generic[Received]):
    """Messages to and from another process, on a stream. Whose end has come is told by ``ConnectionError``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: type[Received]) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)
        self._body_bytes: int | None = None

    def post(self, framed: bytes) -> None:
        """Write one message without waiting; nobody may be there to read it."""
        if not self._writer.is_closing():
            self._writer.write(framed)

    async def flush(self) -> None:
        """Wait while the other side is far behind. Raises ``ConnectionError`` when it is gone."""
        if self._writer.is_closing():
            raise ConnectionResetError("the connection is closed")
        await self._writer.drain()

    async def receive(self) -> Received:
        """The next message. Raises ``ConnectionError`` at the end, ``msgspec.MsgspecError`` for one that is none.

        May be cancelled at any point and called again: a half-read message is continued.
        """
        try:
            if self._body_bytes is None:
                self._body_bytes = int.from_bytes(await self._reader.readexactly(4), "little")
            body = await self._reader.readexactly(self._body_bytes)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the connection was closed") from error
        self._body_bytes = None
        return self._decoder.decode(body)

    def close(self) -> None:
        """Hang up when all is written. Idempotent."""
        self._writer.close()

    def abort(self) -> None:
        """Hang up at once. Idempotent."""
        self._writer.transport.abort()


class Child(Generic[Received]):
    """A running child process, as its parent sees it."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        wire: Wire[Received],
        log_path: Path,
        error: type[ChildError],
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._wire = wire
        self._log_path = log_path
        self._error = error

    @classmethod
    async def spawn(
        cls,
        name: str,
        module: str,
        *,
        log_path: Path,
        receives: type[Received],
        error: type[ChildError],
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> "Child[Received]":
        """Start ``python -m module FD ARGUMENTS`` with its output in ``log_path`` and open files ``pass_fds``.

        The child gets a session of its own, so that a terminal's Ctrl-C reaches only the controller, which then
        ends its children in order.
        """
        ours, theirs = socket.socketpair()
        process = None
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    module,
                    str(theirs.fileno()),
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno(), *pass_fds],
                    start_new_session=True,
                )
            theirs.close()
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            if process is not None:
                # It would end by itself, but only once its imports are done.
                process.kill()
                await process.wait()
            raise
        finally:
            theirs.close()
        return cls(name, process, Wire(reader, writer, receives), log_path, error)

    async def send(self, message: msgspec.Struct) -> None:
        """Write one message; waits only when the child is far behind. Raises the child's error when it has died."""
        self.post(frame(message))
        await self.flush()

    def post(self, framed: bytes) -> None:
        """Write one message, made by :func:`frame`, without waiting; whether it is read shows later."""
        self._wire.post(framed)

    async def flush(self) -> None:
        """Wait while the child is far behind. Raises the child's error when it has died."""
        try:
            await self._wire.flush()
        except ConnectionError:
            raise await self._death() from None

    async def receive(self) -> Received:
        """The child's next message. Raises the child's error when it has died.

        May be cancelled at any point and called again: a half-read message is continued.
        """
        try:
            return await self._wire.receive()
        except ConnectionError:
            raise await self._death() from None
        except msgspec.MsgspecError as error:
            raise self._error(f"{self.name} sent a message that cannot be decoded: {error}") from error

    async def died(self) -> ChildError:
        """Wait until the process has ended; returns the error that says how."""
        await self._process.wait()
        return await self._death()

    async def stop(self, grace_s: float | None = None) -> None:
        """End the process: hang up, wait for ``grace_s`` (default :data:`STOP_GRACE_S`), kill. Idempotent."""
        self._wire.close()
        try:
            async with asyncio.timeout(STOP_GRACE_S if grace_s is None else grace_s):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()

    def _kill(self) -> None:
        try:
            self._process.kill()
        except ProcessLookupError:
            return

    async def _death(self) -> ChildError:
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                code = await self._process.wait()
        except TimeoutError:
            self._kill()
            return self._error(f"{self.name} (pid {self.pid}) closed its connection and was killed.{self.log_tail()}")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return self._error(f"{self.name} (pid {self.pid}) {how}.{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines of its log, for an error message."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError as error:
            return f" Its log {self._log_path} cannot be read: {error.strerror}."
        if not lines:
            return f" Its log {self._log_path} is empty."
        return "\n".join([f" Last lines of {self._log_path}:", *(f"  | {line}" for line in lines)])


def yield_processor() -> None:
    """Give way to the controller, whose loop must answer within milliseconds on a busy machine."""
    os.nice(CHILD_NICENESS)
    # Linux shares the processor between sessions first, and a child has a session of its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(CHILD_NICENESS))


class Parent(Generic[Received]):
    """The controller, as a child process sees it: iterate for its requests, ``send`` the answers."""

    def __init__(self, receives: type[Received], connection: socket.socket) -> None:
        self._socket = connection
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)
        self._requests: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._write_lock = threading.Lock()
        threading.Thread(target=self._read, name="parent-reader", daemon=True).start()

    def __iter__(self) -> Iterator[Received]:
        while True:
            yield self._requests.get()

    def send(self, message: msgspec.Struct) -> None:
        """Write one message; safe from any thread."""
        framed = frame(message)
        with self._write_lock:
            self._socket.sendall(framed)

    @classmethod
    def serve(
        cls,
        receives: type[Received],
        session: "Callable[[Parent[Received]], None]",
        connection: socket.socket | None = None,
    ) -> NoReturn:
        """Run a child's whole life. Whatever ends ``session`` ends the process, whichever threads still run.

        Without a ``connection``, the process is a child on the controller's machine, started by :meth:`Child.spawn`.
        """
        try:
            if connection is None:
                yield_processor()
                connection = socket.socket(fileno=int(sys.argv[1]))
            session(cls(receives, connection))
        except BaseException:  # noqa: BLE001 - the last frame of the process: print, then exit
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)

    def _read(self) -> None:
        code = 0
        try:
            self._read_requests()
        except ConnectionError:
            # The parent went away with answers unread.
            pass
        except BaseException:  # noqa: BLE001 - without this thread nothing would notice that the parent is gone
            traceback.print_exc()
            code = 1
        # The parent hung up or died. Whatever this process computes now has no reader, so it ends at once,
        # without waiting for a train step or a decode loop to notice.
        sys.stderr.flush()
        os._exit(code)

    def _read_requests(self) -> None:
        stream = self._socket.makefile("rb")
        while len(header := stream.read(4)) == 4:
            body_bytes = int.from_bytes(header, "little")
            body = stream.read(body_bytes)
            if len(body) < body_bytes:
                return
            self._requests.put(self._decoder.decode(body))
