"""What a stalled run looks like from inside: the stacks of its threads and of its event loop's tasks, as text.

All of it only reads, so that any thread may ask for it while the event loop stands still. It decides nothing.
"""

import asyncio
import faulthandler
import tempfile
from collections import defaultdict
from types import CoroutineType

NAMES_LISTED = 3
"""How many tasks with one stack are named."""


def thread_stacks() -> str:
    """The Python stack of every thread, the most recent call first."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def task_stacks(event_loop: asyncio.AbstractEventLoop) -> str:
    """What every task of a loop awaits, the most recent call first; tasks that await the same are one entry."""
    tasks: defaultdict[str, list[str]] = defaultdict(list)
    for task in asyncio.all_tasks(event_loop):
        tasks[_stack(task)].append(task.get_name())
    return "\n".join(f"{_named(sorted(names))}\n{stack}" for stack, names in sorted(tasks.items()))


def _stack(task: "asyncio.Task[object]") -> str:
    lines = []
    # A task knows its outermost coroutine, and each coroutine the one that it awaits.
    awaited: object = task.get_coro()
    while isinstance(awaited, CoroutineType):
        frame = awaited.cr_frame
        if frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}\n')
        awaited = awaited.cr_await
    return "".join(reversed(lines))


def _named(names: list[str]) -> str:
    listed = ", ".join(names[:NAMES_LISTED])
    others = len(names) - NAMES_LISTED
    return f"{len(names)} x: {listed}" + (f" and {others} more" if others > 0 else "") if len(names) > 1 else listed
