"""Programs of others as children that cannot be lost.

A program that knows nothing of staleflow runs under a small process of ours, which is at the other end of a socket
pair (``staleflow.process``). When the controller hangs up or dies, however suddenly, that process reads the end of the
stream and ends the program with everything the program has started. When the program ends by itself, it does the same
with what is left of it, and ends in the same way.

This is the controller's side; the process in between is ``staleflow.leashed_program``.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from staleflow.errors import ChildError
from staleflow.process import Child

FAMILY_GRACE_S = 20.0
"""For the process in between, which has a grace of its own to give, and maybe little of the processor. Were it killed
before it is done, whatever the program has started in sessions of their own would live on."""


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
        child = await Child.spawn(name, "staleflow.leashed_program", log_path=log_path, receives=Started, error=error)
        try:
            await child.send(Command(tuple(arguments), dict(environment)))
            started = await child.receive()
        except BaseException:
            await child.stop(FAMILY_GRACE_S)
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
        await self._child.stop(FAMILY_GRACE_S)
        self._kill_rest()

    def _kill_rest(self) -> None:
        """Of what is left if the process in between was itself killed. Once: later the number may be another's."""
        if self._ended:
            return
        self._ended = True
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
