"""News comes between a consumer's last look and its falling asleep: it sleeps for ever beside work."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import uvloop

from staleflow import TrajectoryQueue
from staleflow.errors import QueueClosed

THREADS = 8
MakeLoop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: list[MakeLoop] = [asyncio.SelectorEventLoop, uvloop.new_event_loop]


@pytest.mark.parametrize("make_loop", LOOPS)
@pytest.mark.parametrize("max_items", [1, 64])
def test_H6_eight_threads_wake_the_consumer_every_time(make_loop: MakeLoop, max_items: int) -> None:
    """Every thread waits for its item to be taken before it puts the next, so the consumer falls asleep often."""
    rounds = 150
    queue = TrajectoryQueue[int](THREADS)
    taken = [threading.Semaphore(0) for _ in range(THREADS)]

    def put(thread: int) -> None:
        for _ in range(rounds):
            queue.try_put(thread, deadline=thread % 3)
            taken[thread].acquire()

    async def main() -> int:
        count = 0
        while count < THREADS * rounds:
            for thread in await queue.get_batch(max_items):
                count += 1
                taken[thread].release()
        return count

    threads = [threading.Thread(target=put, args=(thread,), daemon=True) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(main()) == THREADS * rounds
    for thread in threads:
        thread.join()
    statistics = queue.statistics()
    assert statistics.wakes <= statistics.put


@pytest.mark.parametrize("make_loop", LOOPS)
def test_H6_eight_threads_lose_nothing_at_full_speed(make_loop: MakeLoop) -> None:
    items = 2000
    queue = TrajectoryQueue[tuple[int, int]](THREADS * items)

    def put(thread: int) -> None:
        for index in range(items):
            queue.try_put((thread, index))

    async def main() -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        while len(taken) < THREADS * items:
            taken += await queue.get_batch(97)
        return taken

    threads = [threading.Thread(target=put, args=(thread,), daemon=True) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    with asyncio.Runner(loop_factory=make_loop) as runner:
        taken = runner.run(main())
    for owner in range(THREADS):
        assert [index for thread, index in taken if thread == owner] == list(range(items))


def test_H6_closing_from_a_thread_wakes_the_consumer_every_time() -> None:
    async def main() -> None:
        for _ in range(200):
            queue = TrajectoryQueue[int](1)
            thread = threading.Thread(target=queue.close)
            thread.start()
            with pytest.raises(QueueClosed):
                await queue.get_batch(1)
            thread.join()

    asyncio.run(main())
