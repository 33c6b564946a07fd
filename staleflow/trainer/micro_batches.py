"""Who computes which sequences, and in which passes: decided by lengths alone, alike in every rank.

Pure functions on numbers. No sequence is split, every sequence has one place, and ``tests/test_micro_batches.py`` holds
the plans to that.
"""

import heapq
from collections.abc import Iterator, Sequence


def dealt(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of ``sizes`` in ``parts`` parts whose sums differ by no more than the largest size.

    Longest processing time first: the next largest goes to the part with the least so far.
    """
    result: list[list[int]] = [[] for _ in range(parts)]
    least = [(0, part) for part in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        total, part = heapq.heappop(least)
        result[part].append(index)
        heapq.heappush(least, (total + sizes[index], part))
    return result


def micro_batches(lengths: Sequence[int], budget_tokens: int, *, packed: bool) -> Iterator[list[int]]:
    """Indices of ``lengths``, neighbours in length together, in micro-batches of at most so many tokens.

    The tokens of a micro-batch are those of its sequences if they are packed, else padding to the longest is included.
    A sequence that has more is alone.
    """
    chosen: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        length = lengths[index]
        tokens = total + length if packed else (len(chosen) + 1) * length
        if chosen and tokens > budget_tokens:
            yield chosen
            chosen, total = [], 0
        chosen.append(index)
        total += length
    if chosen:
        yield chosen


def planned(
    lengths: Sequence[int], ranks: int, budget_tokens: int, *, packed: bool, even: bool
) -> list[list[list[int]]]:
    """The micro-batches of every rank; if ``even``, filled up with empty ones until all ranks have equally many."""
    plan = []
    for part in dealt(lengths, ranks):
        own = [lengths[index] for index in part]
        plan.append([[part[at] for at in chosen] for chosen in micro_batches(own, budget_tokens, packed=packed)])
    passes = max(map(len, plan))
    return [own + [[]] * (passes - len(own)) for own in plan] if even else plan
