"""A queue that is full makes room by dropping finished work, and only a counter tells."""

import threading

import pytest

from staleflow import TrajectoryQueue
from staleflow.errors import QueueClosed, QueueFull
from staleflow.testing import run_virtually


def test_L8_full_queue_gives_the_item_back() -> None:
    queue = TrajectoryQueue[object](2)
    items = [object(), object(), object()]
    queue.try_put(items[0])
    queue.try_put(items[1])
    with pytest.raises(QueueFull, match="holds 2 items, its capacity") as full:
        queue.try_put(items[2])
    assert full.value.item is items[2]
    assert run_virtually(queue.get_batch(1)) == [items[0]]
    queue.try_put(full.value.item)
    assert run_virtually(queue.get_batch(3)) == items[1:]
    assert queue.statistics().refused == 1


def test_L8_more_urgent_item_pushes_nothing_out() -> None:
    queue = TrajectoryQueue[str](1)
    queue.try_put("due late", deadline=9)
    with pytest.raises(QueueFull):
        queue.try_put("due at once", deadline=0)
    assert run_virtually(queue.get_batch(2)) == ["due late"]


def test_L8_closed_queue_gives_the_item_back() -> None:
    queue = TrajectoryQueue[object](1)
    queue.close()
    item = object()
    with pytest.raises(QueueClosed) as closed:
        queue.try_put(item)
    assert closed.value.item is item


def test_L8_every_item_is_held_or_given_back() -> None:
    queue = TrajectoryQueue[tuple[int, int]](100)
    given_back: list[object] = []

    def put(thread: int) -> None:
        for index in range(50):
            try:
                queue.try_put((thread, index), deadline=index % 3)
            except QueueFull as full:
                given_back.append(full.item)

    threads = [threading.Thread(target=put, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = run_virtually(queue.get_batch(1000))
    assert (len(held), len(given_back)) == (100, 300)
    assert {*held, *given_back} == {(thread, index) for thread in range(8) for index in range(50)}
