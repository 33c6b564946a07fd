"""Trajectories on their way to the trainer: many threads put, one coroutine takes what is due first.

The queue itself, with its bound, order and end, is Rust (:class:`staleflow._core.DeadlineQueue`). This file lets a
coroutine wait for it, on whatever loop it runs. It refuses to know what an item is.
"""

import asyncio
import math
import threading
from typing import TypeVar

from staleflow._core import DeadlineQueue
from staleflow.errors import ConfigError, SecondConsumerError

Item = TypeVar("Item")


class TrajectoryQueue(DeadlineQueue[Item]):
    """A bounded queue from any number of threads to one coroutine, what is due first in front.

    A full queue gives the item back. A closed one delivers what it holds and then raises
    :class:`~staleflow.errors.QueueClosed` to its consumer. An idle consumer is woken once per burst of puts.

    Args:
        capacity: the most items that it holds, 1 to 4294967295.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._consuming = threading.Lock()

    async def get_batch(self, max_items: int, timeout_s: float | None = None) -> list[Item]:
        """Wait for at least one item and take up to ``max_items``: earliest deadline first, then as they were put.

        Cancelling it leaves every item in the queue. The next call may come from another task, thread or loop.

        Args:
            max_items: 1 or more.
            timeout_s: how long to wait, on the running loop's clock. 0 takes what is there; None waits for ever.

        Returns:
            The items; an empty list only if the time was up.

        Raises:
            QueueClosed: the queue was closed, and the last item has been taken.
            SecondConsumerError: another call has not returned yet.
            ConfigError: an argument can never be right.
        """
        if timeout_s is not None and not 0 <= timeout_s < math.inf:
            raise ConfigError(f"timeout_s = {timeout_s} is not allowed: 0 or more, finite; None for no limit")
        if not self._consuming.acquire(blocking=False):
            raise SecondConsumerError("get_batch: another call waits on this queue, and it has one consumer at a time")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._next_batch(max_items)
        except TimeoutError:
            return []
        finally:
            self._stop_waiting()
            self._consuming.release()

    async def _next_batch(self, max_items: int) -> list[Item]:
        """Look, and wait only if there is nothing. Between the last look and the return nothing can intervene."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        while (batch := self._take(max_items, loop, woken.set)) is None:
            await woken.wait()
            woken.clear()
        return batch
