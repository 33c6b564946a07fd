"""The number of groups that may be under way follows from the bound, and a bound of 0 is no reason to stand still."""

import pytest
from support import Scripted

from staleflow import Config, StalenessLedger
from staleflow.events import Admitted


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
def test_V14_capacity_is_one_batch_more_than_the_bound(max_staleness: int, batch_size: int) -> None:
    ledger = StalenessLedger(batch_size=batch_size, max_staleness=max_staleness)
    assert ledger.capacity(0) == (max_staleness + 1) * batch_size
    assert len(ledger.admit_many(0, 10**9)) == (max_staleness + 1) * batch_size


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_V14_run_admits_whole_batches_at_once(scripted: Scripted, max_staleness: int) -> None:
    run = scripted(Config(steps=4, batch_size=3, group_size=2, max_staleness=max_staleness))
    assert run.run().steps == 4
    at_once = [event for event in run.events_of(Admitted) if event.version == 0]
    assert len(at_once) == (max_staleness + 1) * 3
