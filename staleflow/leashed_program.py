"""The process between the controller and a program on a leash: ``python -m staleflow.leashed_program FD``.

It runs the program that it is told to, and outlives neither it nor the controller.
"""

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from staleflow.leash import Command, Started
from staleflow.process import frame, yield_processor

TERMINATE_GRACE_S = 3.0
PAUSE_S = 0.01
PR_SET_CHILD_SUBREAPER = 36


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
