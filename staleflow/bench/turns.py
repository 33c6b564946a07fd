"""Contestants measured in turns, so that a disturbance of the machine falls on all of them."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

Sample: TypeAlias = Callable[[], Mapping[str, float]]
"""Does the work once; returns nanoseconds per item for every step of it."""


def in_turns(contestants: Mapping[str, Sample], samples: int) -> dict[tuple[str, str], list[float]]:
    """Sample every contestant so many times, forwards and backwards in turn; the first round does not count.

    Returns the samples by contestant and step.
    """
    taken: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    with _without_collection():
        for turn in range(samples + 1):
            order = list(contestants.items())
            for name, sample in order if turn % 2 else reversed(order):
                steps = sample()
                if turn:
                    for step, per_item_ns in steps.items():
                        taken[name, step].append(per_item_ns)
    return dict(taken)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python's cycle collector runs before all samples and in none: it would charge one contestant for all garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
