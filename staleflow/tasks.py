"""Where tasks come from: a source that hands out the next task and, if a run is to be resumed, can go back.

``ListTasks`` serves what fits in memory; anything else implements :class:`TaskSource`. A source knows nothing of
groups or of what becomes of its tasks.
"""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from staleflow.errors import ConfigError, TaskSourceError
from staleflow.types import Task, TaskData

Item = TypeVar("Item")


class TaskSource(Protocol[TaskData]):
    """Hands out tasks, one call at a time."""

    async def next(self) -> Task[TaskData] | None:
        """The next task, with ids that count up from 0; None when there will be no more."""


@runtime_checkable
class ResumableTaskSource(TaskSource[TaskData], Protocol[TaskData]):
    """A source that checkpoints can be made with.

    ``cursor`` is the id of the task that ``next`` hands out next. It may be set, between two calls, to any task that
    was handed out before, in this process or in another one; the same tasks then come again.
    """

    cursor: int


async def hand_out_again(
    source: ResumableTaskSource[TaskData], tasks: Iterable[int], *, cursor: int
) -> dict[int, Task[TaskData]]:
    """Some tasks by id, from a source that then goes on at ``cursor``; raises :class:`TaskSourceError`."""
    found = {}
    for number in tasks:
        source.cursor = number
        task = await source.next()
        if task is None or task.id != number:
            came = "none" if task is None else f"task {task.id}"
            raise TaskSourceError(f"the task source was asked for task {number} again and handed out {came}")
        found[number] = task
    source.cursor = cursor
    return found


class ListTasks(Generic[TaskData]):
    """Tasks from a list, in a new random order in every epoch.

    Args:
        items: the tasks' data; must not be empty.
        epochs: how often to go through the list; None for ever.
        seed: of the order. ``None`` keeps the order of the list.
        cursor: number of tasks already handed out, to go on where another source stopped.
    """

    def __init__(
        self, items: Sequence[TaskData], *, epochs: int | None = None, seed: int | None = 0, cursor: int = 0
    ) -> None:
        if not items:
            raise TaskSourceError("the task source is empty; it needs at least one task")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs is {epochs}; it must be at least 1, or None for no end")
        if cursor < 0:
            raise ConfigError(f"cursor is {cursor}; it must not be negative")
        self._items = items
        self._epochs = epochs
        self._seed = seed
        self._order: tuple[int, list[int]] | None = None
        self.cursor = cursor

    async def next(self) -> Task[TaskData] | None:
        """See :class:`TaskSource`."""
        epoch, position = divmod(self.cursor, len(self._items))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        task = Task(self.cursor, self._items[self._order_of(epoch)[position]])
        self.cursor += 1
        return task

    def _order_of(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._items)))
            if self._seed is not None:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


def read_jsonl(path: str | Path, item: type[Item]) -> list[Item]:
    """Read one task per line, checked against ``item`` (a msgspec Struct, dataclass, TypedDict or ``dict``).

    Raises :class:`TaskSourceError` that names file, line and field of the first malformed task, or says that the
    file is missing or holds none.
    """
    decoder: msgspec.json.Decoder[Item] = msgspec.json.Decoder(item)
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise TaskSourceError(f"task file {path} cannot be read: {error.strerror}") from error
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise TaskSourceError(f"task file {path}, line {number}: {error}") from error
        except UnicodeDecodeError as error:
            raise TaskSourceError(f"task file {path}, line {number}: not UTF-8 text: {error}") from error
    if not items:
        raise TaskSourceError(f"task file {path} holds no task")
    return items
