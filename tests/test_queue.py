import asyncio
import contextlib
import gc
import math
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple, Unpack

import pytest
import uvloop

from staleflow import QueueStatistics, TrajectoryQueue, _core
from staleflow.errors import ConfigError, QueueClosed, QueueFull, SecondConsumerError
from staleflow.testing import run_virtually

Arguments = TypeVarTuple("Arguments")
MakeLoop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: list[MakeLoop] = [asyncio.SelectorEventLoop, uvloop.new_event_loop]


class Node:
    """Something that can be part of a cycle and be watched."""

    def __init__(self, other: object = None) -> None:
        self.other = other


def test_due_first_leaves_first_and_then_as_it_was_put() -> None:
    async def main() -> None:
        queue = TrajectoryQueue[str](8)
        for deadline, item in ((3, "a"), (1, "b"), (2, "c"), (1, "d")):
            queue.try_put(item, deadline)
        queue.try_put("e")
        assert await queue.get_batch(3) == ["e", "b", "d"]
        assert await queue.get_batch(8) == ["c", "a"]

    run_virtually(main())


def test_statistics() -> None:
    async def main() -> QueueStatistics:
        queue = TrajectoryQueue[int](2)
        waiting = asyncio.create_task(queue.get_batch(1))
        await asyncio.sleep(0)
        queue.try_put(1)
        queue.try_put(2)
        with pytest.raises(QueueFull):
            queue.try_put(3)
        assert await waiting == [1]
        assert (len(queue), queue.capacity, queue.closed) == (1, 2, False)
        return queue.statistics()

    statistics = run_virtually(main())
    assert repr(statistics) == "QueueStatistics(put=2, taken=1, held=1, refused=1, wakes=1, high_water=2)"
    assert statistics == run_virtually(main())
    assert (statistics.put, statistics.taken, statistics.held) == (2, 1, 1)
    assert (statistics.refused, statistics.wakes, statistics.high_water) == (1, 1, 2)


@pytest.mark.parametrize("capacity", [0, -1, 2**32, -(10**30)])
def test_capacity_out_of_range_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"capacity = {capacity} is not allowed: 1 to 4294967295"):
        TrajectoryQueue[int](capacity)


@pytest.mark.parametrize("deadline", [-1, 2**64, -(10**30)])
def test_deadline_that_is_no_batch_is_refused(deadline: int) -> None:
    queue = TrajectoryQueue[int](1)
    with pytest.raises(ConfigError, match=f"deadline = {deadline} is not allowed"):
        queue.try_put(1, deadline)
    assert len(queue) == 0


@pytest.mark.parametrize("max_items", [0, -1, -(10**30)])
def test_max_items_out_of_range_is_refused(max_items: int) -> None:
    queue = TrajectoryQueue[int](1)
    queue.try_put(1)
    with pytest.raises(ConfigError, match=f"max_items = {max_items} is not allowed"):
        run_virtually(queue.get_batch(max_items))
    assert run_virtually(queue.get_batch(10**30)) == [1]


@pytest.mark.parametrize("timeout_s", [-1.0, math.inf, math.nan])
def test_timeout_out_of_range_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        run_virtually(TrajectoryQueue[int](1).get_batch(1, timeout_s))


def test_timeout_is_on_the_loops_clock() -> None:
    async def main() -> float:
        assert await TrajectoryQueue[int](1).get_batch(1, timeout_s=30.0) == []
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(30.0)


def test_timeout_of_zero_takes_what_is_there() -> None:
    async def main() -> None:
        queue = TrajectoryQueue[int](1)
        queue.try_put(1)
        assert await queue.get_batch(1, timeout_s=0) == [1]
        assert await queue.get_batch(1, timeout_s=0) == []

    run_virtually(main())


@pytest.mark.parametrize("order", ["put first", "timeout first"])
def test_timeout_that_races_with_a_put_loses_nothing(order: str) -> None:
    async def main() -> None:
        queue = TrajectoryQueue[int](1)
        loop = asyncio.get_running_loop()
        if order == "put first":
            loop.call_at(1.0, queue.try_put, 1)
        waiting = asyncio.create_task(queue.get_batch(1, timeout_s=1.0))
        await asyncio.sleep(0)
        if order == "timeout first":
            loop.call_at(1.0, queue.try_put, 1)
        first = await waiting
        assert first + await queue.get_batch(1, timeout_s=1.0) == [1]

    run_virtually(main())


@pytest.mark.parametrize("ticks", range(5))
def test_cancellation_loses_nothing(ticks: int) -> None:
    """Cancelled before the put, after it, while the wake-up is on its way, and after it has come."""

    async def main() -> None:
        queue = TrajectoryQueue[int](2)
        waiting = asyncio.create_task(queue.get_batch(2))
        await asyncio.sleep(0)
        if ticks > 0:
            queue.try_put(1)
        for _ in range(1, ticks):
            await asyncio.sleep(0)
        waiting.cancel()
        taken: list[int] = []
        with contextlib.suppress(asyncio.CancelledError):
            taken = await waiting
        queue.try_put(2)
        while len(queue):
            taken += await queue.get_batch(2)
        assert taken == ([1, 2] if ticks > 0 else [2])

    run_virtually(main())


def test_wake_up_that_nobody_waits_for_is_forgotten() -> None:
    async def main() -> None:
        queue = TrajectoryQueue[int](2)
        cancelled = asyncio.create_task(queue.get_batch(1))
        await asyncio.sleep(0)
        queue.try_put(1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert await queue.get_batch(1) == [1]
        assert await queue.get_batch(1, timeout_s=1.0) == []
        assert queue.statistics().wakes == 1

    run_virtually(main())


def test_second_consumer_is_refused_and_the_first_goes_on() -> None:
    async def main() -> None:
        queue = TrajectoryQueue[int](1)
        first = asyncio.create_task(queue.get_batch(1))
        await asyncio.sleep(0)
        with pytest.raises(SecondConsumerError, match="one consumer at a time"):
            await queue.get_batch(1)
        queue.try_put(1)
        assert await first == [1]
        assert await queue.get_batch(1, timeout_s=0) == []

    run_virtually(main())


def test_closing_wakes_the_consumer() -> None:
    async def main() -> None:
        queue = TrajectoryQueue[int](1)
        waiting = asyncio.create_task(queue.get_batch(1))
        await asyncio.sleep(0)
        queue.close()
        queue.close()
        with pytest.raises(QueueClosed, match="its last item was taken"):
            await waiting
        assert queue.closed

    run_virtually(main())


@pytest.mark.parametrize("make_loop", LOOPS)
def test_burst_from_a_thread_wakes_once(make_loop: MakeLoop) -> None:
    async def main() -> None:
        queue = TrajectoryQueue[int](1000)

        def burst() -> None:
            for item in range(1000):
                queue.try_put(item)

        for bursts in range(1, 4):
            waiting = asyncio.create_task(queue.get_batch(1000))
            await asyncio.sleep(0)
            thread = threading.Thread(target=burst)
            thread.start()
            thread.join()  # the loop stands still, so the whole burst is there when it looks
            assert await waiting == list(range(1000))
            assert queue.statistics().wakes == bursts

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


def test_consumer_moves_between_loops_and_threads() -> None:
    queue = TrajectoryQueue[int](1)
    taken: list[int] = []

    def consume(make_loop: MakeLoop) -> None:
        async def main() -> None:
            waiting = asyncio.create_task(queue.get_batch(1))
            await asyncio.sleep(0)
            await asyncio.to_thread(queue.try_put, len(taken))
            taken.extend(await waiting)

        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(main())

    for make_loop in LOOPS * 2:
        consume(make_loop)
        thread = threading.Thread(target=consume, args=(make_loop,))
        thread.start()
        thread.join()
    assert taken == list(range(8))


@pytest.mark.parametrize("make_loop", LOOPS)
def test_loop_that_is_closed_meanwhile_does_not_harm_the_producer(make_loop: MakeLoop) -> None:
    queue = TrajectoryQueue[int](2)
    loop = make_loop()
    waiting = queue.get_batch(1)
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    loop.set_exception_handler(lambda loop, context: None)  # the task is pending for ever, and says so
    loop.close()
    queue.try_put(1)
    queue.try_put(2)
    del task
    waiting.close()
    assert run_virtually(queue.get_batch(2)) == [1, 2]


class InterruptedLoop(asyncio.SelectorEventLoop):
    """Ctrl-C arrives on the producer's thread just as the loop is to be woken."""

    interrupted = False

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return super().call_soon_threadsafe(callback, *args, context=context)


def test_interrupted_producer_still_wakes_the_consumer() -> None:
    async def main() -> None:
        queue = TrajectoryQueue[int](1)
        waiting = asyncio.create_task(queue.get_batch(1))
        await asyncio.sleep(0)
        with pytest.raises(KeyboardInterrupt):
            queue.try_put(1)
        assert await waiting == [1]

    with asyncio.Runner(loop_factory=InterruptedLoop) as runner:
        runner.run(main())


def test_queue_in_a_cycle_is_collected() -> None:
    queue = TrajectoryQueue[Node](2)
    queue.try_put(Node(queue))
    queue.try_put(Node(queue), 7)
    watch = weakref.ref(queue)
    gc.collect()
    assert len(queue) == 2, "what is held is not garbage"
    del queue
    gc.collect()
    assert watch() is None


def test_items_live_as_long_as_the_queue_holds_them() -> None:
    async def main() -> None:
        queue = TrajectoryQueue[Node](1)
        item = Node()
        watch = weakref.ref(item)
        queue.try_put(item)
        del item
        gc.collect()
        assert watch() is not None
        await queue.get_batch(1)
        assert watch() is None

    run_virtually(main())


def test_finalizer_of_an_item_may_use_the_queue() -> None:
    class Last:
        def __init__(self, queue: "TrajectoryQueue[object]") -> None:
            self.queue = queue

        def __del__(self) -> None:
            with contextlib.suppress(QueueFull, QueueClosed):
                self.queue.try_put("from a finalizer")
            self.queue.statistics()

    queue = TrajectoryQueue[object](2)
    queue.try_put(Last(queue))
    assert len(run_virtually(queue.get_batch(1))) == 1
    assert run_virtually(queue.get_batch(1)) == ["from a finalizer"]
    queue.try_put(Last(queue))
    del queue
    gc.collect()


def test_errors_keep_their_item_when_pickled() -> None:
    queue = TrajectoryQueue[str](1)
    queue.try_put("a")
    with pytest.raises(QueueFull) as full:
        queue.try_put("b")
    copy = pickle.loads(pickle.dumps(full.value))
    assert (str(copy), copy.item) == ("the queue holds 1 items, its capacity; put this one later", "b")


LOAD_THE_EXTENSION_ALONE = f"""
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

loader = ExtensionFileLoader("staleflow._core", {_core.__file__!r})
loader.exec_module(module_from_spec(spec_from_loader("staleflow._core", loader)))
"""

LOAD_IN_TWO_OTHERS = f"""
import _xxsubinterpreters as interpreters

for _ in range(2):
    try:
        interpreters.run_string(interpreters.create(), {LOAD_THE_EXTENSION_ALONE!r})
        print("works")
    except interpreters.RunFailedError as error:
        assert "ImportError" in str(error) and "staleflow._core is in use by another" in str(error), error
        print("refused")
"""


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (LOAD_THE_EXTENSION_ALONE + LOAD_IN_TWO_OTHERS, ["refused", "refused"]),
        (LOAD_IN_TWO_OTHERS, ["works", "refused"]),
    ],
    ids=["main first", "another first"],
)
def test_second_interpreter_of_a_process_is_refused_clearly(program: str, outcome: list[str]) -> None:
    pytest.importorskip("_xxsubinterpreters")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == outcome
