"""What a queue from threads to one coroutine costs, per item and per wake-up, beside the two of the standard library.

Each queue is used in the way that is right across threads: ``asyncio.Queue`` is fed by ``call_soon_threadsafe``, and
``queue.Queue`` is waited for in an executor's thread. All hand over up to ``MAX_ITEMS`` at once, on the kind of loop
that :func:`staleflow.run` uses. Only ``TrajectoryQueue`` puts first what is due first.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from time import perf_counter_ns, sleep
from typing import Any, NamedTuple, TypeAlias

from staleflow.bench.plan import Plan
from staleflow.bench.result import Figure, Part
from staleflow.bench.turns import Sample, in_turns
from staleflow.queue import TrajectoryQueue
from staleflow.runner import loop_factory

MAX_ITEMS = 256
PRODUCERS = (1, 4, 8)
IDLE_S = 0.0005
"""Before each wake-up, so that the loop really sleeps."""
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


class Face(NamedTuple):
    """A queue as the measurements see it."""

    put: Callable[[Any], object]
    """From any thread."""
    put_here: Callable[[Any], object]
    """From the consumer's own thread."""
    get: Callable[[], Awaitable[list[Any]]]
    """Waits for at least one item."""


def trajectory_queue(capacity: int) -> Face:
    """Ours."""
    ours = TrajectoryQueue[Any](capacity)
    return Face(ours.try_put, ours.try_put, lambda: ours.get_batch(MAX_ITEMS))


def asyncio_queue(capacity: int) -> Face:
    """The event loop's, which no other thread may touch."""
    theirs = asyncio.Queue[Any](capacity)

    async def get() -> list[Any]:
        items = [await theirs.get()]
        while len(items) < MAX_ITEMS and not theirs.empty():
            items.append(theirs.get_nowait())
        return items

    loop = asyncio.get_running_loop()
    return Face(lambda item: loop.call_soon_threadsafe(theirs.put_nowait, item), theirs.put_nowait, get)


def thread_queue(capacity: int) -> Face:
    """The one for threads, which no coroutine may wait for."""
    theirs = queue.Queue[Any](capacity)
    loop = asyncio.get_running_loop()

    async def get() -> list[Any]:
        items = [await loop.run_in_executor(None, theirs.get)]
        while len(items) < MAX_ITEMS and not theirs.empty():
            items.append(theirs.get_nowait())
        return items

    return Face(theirs.put_nowait, theirs.put_nowait, get)


CONTESTANTS: dict[str, Callable[[int], Face]] = {
    "TrajectoryQueue": trajectory_queue,
    "asyncio.Queue": asyncio_queue,
    "queue.Queue": thread_queue,
}


Measurement: TypeAlias = Callable[[Callable[[int], Face]], Coroutine[Any, Any, dict[str, float]]]
"""Given how to make a queue of some capacity, nanoseconds per item or wake-up, by step."""


def measure(plan: Plan) -> Iterator[list[Figure]]:
    """One thread alone, then so many producers, then wake-ups; yields after each."""
    yield _measure(plan, "queue", "alone", 1, lambda make: alone(make, plan.items))
    for producers in PRODUCERS:
        yield _measure(plan, "queue", "transfer", producers, partial(transfer, items=plan.items, producers=producers))
    yield _measure(plan, "wake-up", "wake-up", 1, partial(wake_up, wakes=plan.wakes))


async def alone(make: Callable[[int], Face], items: int) -> dict[str, float]:
    """Put everything, then take everything, in one thread."""
    face = make(items)
    start = perf_counter_ns()
    for item in range(items):
        face.put_here(item)
    put = perf_counter_ns()
    await _take(face, items)
    taken = perf_counter_ns()
    return {"put": (put - start) / items, "take": (taken - put) / items}


async def transfer(make: Callable[[int], Face], items: int, producers: int) -> dict[str, float]:
    """From several threads to the coroutine, all at once; from the first put to the last item taken."""
    face = make(items)
    share = items // producers
    go = threading.Event()

    def produce() -> None:
        go.wait()
        for item in range(share):
            face.put(item)

    threads = [threading.Thread(target=produce, daemon=True) for _ in range(producers)]
    for thread in threads:
        thread.start()
    start = perf_counter_ns()
    go.set()
    await _take(face, share * producers)
    taken = perf_counter_ns()
    for thread in threads:
        thread.join()
    return {"item": (taken - start) / (share * producers)}


async def wake_up(make: Callable[[int], Face], wakes: int) -> dict[str, float]:
    """One item at a time to a coroutine that waits on a loop with nothing else to do."""
    face = make(1)
    waiting = threading.Event()

    def produce() -> None:
        for _ in range(wakes):
            waiting.wait()
            waiting.clear()
            sleep(IDLE_S)
            face.put(perf_counter_ns())

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    latencies = []
    for _ in range(wakes):
        waiting.set()
        (put,) = await face.get()
        latencies.append(perf_counter_ns() - put)
    thread.join()
    latencies.sort()
    return {name: latencies[int(share * (wakes - 1))] for name, share in QUANTILES.items()}


async def _take(face: Face, items: int) -> None:
    while items > 0:
        items -= len(await face.get())


def _measure(plan: Plan, part: Part, work: str, producers: int, measurement: Measurement) -> list[Figure]:
    contestants = {name: _sample(partial(measurement, make)) for name, make in CONTESTANTS.items()}
    return [
        Figure(
            part=part,
            work=work,
            step=step,
            contestant=contestant,
            setting={"producers": producers},
            unit="ns",
            samples=samples,
        )
        for (contestant, step), samples in in_turns(contestants, plan.samples).items()
    ]


def _sample(main: Callable[[], Coroutine[Any, Any, dict[str, float]]]) -> Sample:
    def sample() -> dict[str, float]:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(main())

    return sample
