"""A child process for tests, without torch: ``python -m tiny_child FD``. It does what ``$TINY_CHILD`` says."""

import os
import signal
import sys
import time
from typing import Any

import msgspec

from staleflow.process import Parent


class Ask(msgspec.Struct, tag=True, frozen=True):
    text: str


class Reply(msgspec.Struct, tag=True, frozen=True):
    text: str
    pid: int


def session(parent: Parent[Ask]) -> None:
    if os.environ["TINY_CHILD"] == "flood":
        # More than the controller's reader takes in unasked, less than would block this thread.
        for _ in range(25):
            parent.send(Reply("nobody reads this".ljust(10_000), os.getpid()))
    for ask in parent:
        if ask.text == "raise":
            raise RuntimeError("the child cannot go on")
        parent.send(Reply(ask.text, os.getpid()))


def die_at_start() -> None:
    for line in range(200):
        print(f"line {line}")
    print("x" * 100_000)
    raise ImportError("no module named torch")


def hang() -> None:
    """Keep the socket open and react to nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("hanging", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    behaviour: Any = {"die at start": die_at_start, "hang": hang}.get(os.environ["TINY_CHILD"])
    if behaviour is not None:
        sys.exit(behaviour())
    Parent.serve(Ask, session)
