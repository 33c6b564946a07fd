"""What is measured: the configurations of the ledger, and how much of everything."""

from collections.abc import Iterator

import msgspec

BATCH_SIZES = (64, 512, 4096)
MAX_STALENESS = (0, 1, 4, 16)
LIVE = (0, 1_000, 100_000)


class Cell(msgspec.Struct, frozen=True):
    """One configuration of the ledger. ``live`` groups run in the background while a batch goes through its life."""

    batch_size: int
    max_staleness: int
    live: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured.

    Args:
        cells: configurations of the ledger.
        groups: of the ledger per sample, at least one batch.
        items: through a queue per sample.
        wakes: wake-ups per sample.
        steps: train steps of the pipeline per sample.
        samples: of every figure, taken in turns with its baselines.
    """

    cells: tuple[Cell, ...]
    groups: int
    items: int
    wakes: int
    steps: int
    samples: int


def lawful(batch_size: int, max_staleness: int) -> Iterator[Cell]:
    """Cells that can exist.

    A group that waits behind ``live`` others is trained ``live / batch_size`` versions after its own, so more than
    ``max_staleness * batch_size`` can never be in the background. As many as that is a cell too: every place is taken
    and every deadline has its groups, as in a run whose engines are never idle.
    """
    limit = max_staleness * batch_size
    for live in (*(live for live in LIVE if live < limit), limit):
        yield Cell(batch_size, max_staleness, live)


def grid() -> tuple[Cell, ...]:
    """Every lawful cell, and one batch size more: 100,000 groups may be live under none of the others."""
    sizes = [(size, bound) for size in BATCH_SIZES for bound in MAX_STALENESS]
    return tuple(cell for size, bound in [*sizes, (8192, 16)] for cell in lawful(size, bound))


FULL = Plan(cells=grid(), groups=4096, items=50_000, wakes=2_000, steps=20, samples=7)
QUICK = Plan(cells=(*lawful(64, 1), *lawful(512, 4)), groups=1024, items=10_000, wakes=500, steps=5, samples=5)
