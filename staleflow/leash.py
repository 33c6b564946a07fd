"""Programs of others as children that cannot be lost.

A program that knows nothing of staleflow runs under a small process of ours, which is at the other end of a socket
pair (``staleflow.process``). When the controller hangs up or dies, however suddenly, that process reads the end of the
stream and ends the program with everything the program has started. When the program ends by itself, it does the same
with what is left of it, and ends in the same way.

The first half of this file runs in the controller (:class:`Leashed`), the second is ``python -m staleflow.leash FD``.
"""

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from staleflow.errors import ChildError
from staleflow.process import Child, frame, yield_processor

TERMINATE_GRACE_S = 3.0
PAUSE_S = 0.01
PR_SET_CHILD_SUBREAPER = 36


class Command(msgspec.Struct, tag=True, frozen=True):
    """The only message to the process in between: what to run, and what to add to the environment."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


class Started(msgspec.Struct, tag=True, frozen=True):
    """Its only answer. The program leads a process group."""

    pid: int


class Leashed:
    """A running program, as the controller sees it."""

    def __init__(self, child: Child[Started], pid: int) -> None:
        self.pid = pid
        self._child = child
        self._ended = False

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        error: type[ChildError],
    ) -> "Leashed":
        """Run a program with its output in ``log_path``; raises ``error`` if it cannot be run."""
        child = await Child.spawn(name, "staleflow.leash", log_path=log_path, receives=Started, error=error)
        try:
            await child.send(Command(tuple(arguments), dict(environment)))
            started = await child.receive()
        except BaseException:
            await child.stop()
            raise
        return cls(child, started.pid)

    async def died(self) -> ChildError:
        """Wait until the program has ended; returns the error that says how, with the last lines of its log."""
        death = await self._child.died()
        await self.stop()
        return death

    def log_tail(self) -> str:
        """The last lines that the program has written, for an error message."""
        return self._child.log_tail()

    async def stop(self) -> None:
        """End the program and all that it has started. Idempotent."""
        await self._child.stop()
        self._kill_rest()

    def _kill_rest(self) -> None:
        """Of what is left if the process in between was itself killed. Once: later the number may be another's."""
        if self._ended:
            return
        self._ended = True
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def main() -> None:
    """Run a program until it ends or the controller does."""
    yield_processor()
    controller = socket.socket(fileno=int(sys.argv[1]))
    command = _receive(controller)
    # What loses its parent among the program's processes becomes a child of this one, and can be found.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(
        command.arguments, env=os.environ | command.environment, stdin=subprocess.DEVNULL, process_group=0
    )
    with suppress(ConnectionError):
        controller.sendall(frame(Started(program.pid)))
    ended = os.pidfd_open(program.pid)
    _wait_for_either(controller, ended)
    _end_all(program)
    if program.returncode < 0:
        # As the program was ended, so that the controller can tell by which signal. Of SIGKILL nobody can be in charge.
        with suppress(OSError):
            signal.signal(-program.returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -program.returncode)
    sys.exit(program.returncode)


def _receive(controller: socket.socket) -> Command:
    stream = controller.makefile("rb")
    body = stream.read(int.from_bytes(stream.read(4), "little"))
    if not body:
        sys.exit(0)
    return msgspec.msgpack.decode(body, type=Command)


def _wait_for_either(*descriptors: int | socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        selector.select()


def _end_all(program: "subprocess.Popen[bytes]") -> None:
    """End the program and what it has started: ask each, and kill what is left when the grace is over.

    The children of what has ended become this process's own, and it is their turn. Only what ends in its own way
    removes its shared memory.
    """
    kill_at_s = time.monotonic() + TERMINATE_GRACE_S
    asked: set[int] = set()
    while children := _children():
        for pid in children:
            with suppress(ProcessLookupError):
                if time.monotonic() >= kill_at_s:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    asked.add(pid)
                    os.kill(pid, signal.SIGTERM)
        time.sleep(PAUSE_S)
        program.poll()
        for pid in children:
            if pid != program.pid:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    """Processes whose parent this is, ended ones that nobody has waited for included."""
    own, found = os.getpid(), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The second field, the program's name in brackets, may contain anything.
            if int(path.read_text().rpartition(")")[2].split()[1]) == own:
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    main()
