"""A consumer guesses from counts that nothing more will come, and leaves, or waits for what never comes."""

import asyncio
import gc
import threading

import pytest

from staleflow import TrajectoryQueue
from staleflow.errors import QueueClosed
from staleflow.testing import VirtualDeadlockError, run_virtually


async def consume(queue: TrajectoryQueue[int]) -> list[int]:
    """Everything until the end."""
    taken: list[int] = []
    while True:
        try:
            taken += await queue.get_batch(2)
        except QueueClosed:
            return taken


def test_H18_termination_is_a_message() -> None:
    async def main() -> None:
        queue = TrajectoryQueue[int](8)
        consumer = asyncio.create_task(consume(queue))
        for item in range(4):
            queue.try_put(item)
            await asyncio.sleep(1.0)
            assert not consumer.done(), "an empty queue has not ended"
        queue.close()
        assert await consumer == [0, 1, 2, 3]

    run_virtually(main())


def test_H18_end_comes_after_the_last_item() -> None:
    queue = TrajectoryQueue[int](8)
    for item in range(5):
        queue.try_put(item, deadline=5 - item)
    queue.close()
    assert run_virtually(consume(queue)) == [4, 3, 2, 1, 0]
    for _ in range(2):
        with pytest.raises(QueueClosed):
            run_virtually(queue.get_batch(1))


def test_H18_without_the_message_there_is_no_end() -> None:
    queue = TrajectoryQueue[int](1)
    queue.try_put(0)
    with pytest.raises(VirtualDeadlockError):
        run_virtually(consume(queue))
    gc.collect()


def test_H18_item_put_while_closing_is_delivered_or_given_back() -> None:
    async def main(queue: TrajectoryQueue[int]) -> None:
        accepted: list[int] = []
        given_back: list[object] = []

        def put() -> None:
            try:
                for item in range(1000):
                    queue.try_put(item)
                    accepted.append(item)
            except QueueClosed as closed:
                given_back.append(closed.item)

        threads = [threading.Thread(target=put), threading.Thread(target=queue.close)]
        for thread in threads:
            thread.start()
        taken = await consume(queue)
        for thread in threads:
            thread.join()
        assert taken == accepted
        assert given_back == ([] if len(accepted) == 1000 else [len(accepted)])

    for _ in range(20):
        asyncio.run(main(TrajectoryQueue[int](1000)))
