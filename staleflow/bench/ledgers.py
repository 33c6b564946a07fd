"""What the ledger costs from Python, operation by operation, beside its twin in plain Python.

The ledger is measured in motion: ``live`` groups run in the background, and every turn admits one batch, completes the
one admitted first, consumes it and publishes. The loop around single calls is in every figure, of both contestants;
making the list of the ids due is in none.
"""

from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import TypeAlias

import msgspec

from staleflow._core import StalenessLedger
from staleflow.bench.plan import Cell, Plan
from staleflow.bench.result import Figure
from staleflow.bench.turns import Sample, in_turns
from staleflow.bench.twin import TwinLedger

MEMBERS = 8
"""Of a group, in the life that tells the ledger about each of them."""

Ledger: TypeAlias = StalenessLedger | TwinLedger
Spent: TypeAlias = dict[str, int]
"""Nanoseconds of one turn, by step."""

CONTESTANTS: dict[str, type[StalenessLedger] | type[TwinLedger]] = {
    "Python": StalenessLedger,
    "twin": TwinLedger,
}


class World:
    """A ledger in the middle of a run: as many turns have passed as there are deadlines, so they are spread."""

    def __init__(self, kind: type[StalenessLedger] | type[TwinLedger], cell: Cell, group_size: int) -> None:
        self.ledger: Ledger = kind(batch_size=cell.batch_size, max_staleness=cell.max_staleness, group_size=group_size)
        self.batch_size = cell.batch_size
        self.is_full = cell.live == cell.max_staleness * cell.batch_size
        self.oldest = 1
        self.ledger.admit_many(0, cell.live)
        for _ in range(cell.max_staleness + 1):
            bulk(self)

    def take_due(self) -> list[int]:
        """The batch that was admitted first: ids are consecutive."""
        first, self.oldest = self.oldest, self.oldest + self.batch_size
        return list(range(first, self.oldest))


def bulk(world: World) -> Spent:
    """One batch, with a call for all of its groups."""
    ledger, due, version = world.ledger, world.take_due(), world.ledger.published
    start = perf_counter_ns()
    ledger.admit_many(version, world.batch_size)
    admitted = perf_counter_ns()
    ledger.complete_many(due)
    completed = perf_counter_ns()
    ledger.consume()
    consumed = perf_counter_ns()
    ledger.publish(version + 1)
    published = perf_counter_ns()
    return {
        "admit": admitted - start,
        "complete": completed - admitted,
        "consume": consumed - completed,
        "publish": published - consumed,
        "life": published - start,
    }


def single(world: World) -> Spent:
    """One batch, with two calls for each of its groups. If it fills the ledger, as many more ask in vain."""
    ledger, due, version = world.ledger, world.take_due(), world.ledger.published
    start = perf_counter_ns()
    for _ in due:
        ledger.admit(version)
    admitted = perf_counter_ns()
    if world.is_full:
        for _ in due:
            ledger.admit(version)
    refused = perf_counter_ns()
    for group in due:
        ledger.complete(group)
    completed = perf_counter_ns()
    ledger.consume()
    ledger.publish(version + 1)
    published = perf_counter_ns()
    life = {"admit": admitted - start, "complete": completed - refused, "life": published - refused + admitted - start}
    return life | {"refused admit": refused - admitted} if world.is_full else life


def members(world: World) -> Spent:
    """One batch, with a call for every start and every end of a member. Every end reports the newest version."""
    ledger, due, version = world.ledger, world.take_due(), world.ledger.published
    start = perf_counter_ns()
    for _ in due:
        ledger.admit(version)
    admitted = perf_counter_ns()
    for group in due:
        for member in range(1, MEMBERS):
            ledger.start_member(group, member, version)
    started = perf_counter_ns()
    for group in due:
        for member in range(MEMBERS):
            ledger.finish_member(group, member, min_version=version)
    finished = perf_counter_ns()
    ledger.consume()
    ledger.publish(version + 1)
    published = perf_counter_ns()
    return {"start_member": started - admitted, "finish_member": finished - started, "life": published - start}


LIVES: dict[str, tuple[Callable[[World], Spent], int, dict[str, int]]] = {
    "bulk": (bulk, 1, {}),
    "single": (single, 1, {}),
    "members": (members, MEMBERS, {"start_member": MEMBERS - 1, "finish_member": MEMBERS}),
}
"""How a batch is taken through its life, the size of its groups, and how often a step is done per group if not once."""


def measure(plan: Plan) -> Iterator[list[Figure]]:
    """Every life in every cell of the plan; yields after each."""
    for cell in plan.cells:
        for life in LIVES:
            yield _measure(cell, life, plan)


def _measure(cell: Cell, life: str, plan: Plan) -> list[Figure]:
    turns = max(1, plan.groups // cell.batch_size)
    contestants = {name: _sample(World(kind, cell, LIVES[life][1]), life, turns) for name, kind in CONTESTANTS.items()}
    return [
        Figure(
            part="ledger",
            work=life,
            step=step,
            contestant=contestant,
            setting=msgspec.structs.asdict(cell),
            unit="ns",
            samples=samples,
        )
        for (contestant, step), samples in in_turns(contestants, plan.samples).items()
    ]


def _sample(world: World, life: str, turns: int) -> Sample:
    turn, _, calls = LIVES[life]

    def sample() -> dict[str, float]:
        spent = [turn(world) for _ in range(turns)]
        groups = turns * world.batch_size
        return {step: sum(each[step] for each in spent) / (groups * calls.get(step, 1)) for step in spent[0]}

    return sample
