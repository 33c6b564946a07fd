"""Groups are filtered after they finished and before the hand-over: the batch is filled up, never handed out short."""

import pytest

from staleflow import StalenessLedger
from staleflow.errors import NotReadyError


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("filtered", [1, 3, 4])
def test_L17_filtered_groups_are_filled_up_before_hand_over(filtered: int, max_staleness: int) -> None:
    ledger = StalenessLedger(batch_size=4, max_staleness=max_staleness)
    groups = ledger.admit_many(0, 4)
    ledger.complete_many(groups)
    assert ledger.is_ready()
    for group in groups[:filtered]:
        ledger.filter(group, "no signal")
    assert not ledger.is_ready()
    with pytest.raises(NotReadyError):
        ledger.consume()
    fresh = ledger.admit_many(0, filtered)
    assert len(fresh) == filtered
    ledger.complete_many(fresh[:-1])
    assert not ledger.is_ready()
    ledger.complete(fresh[-1])
    assert ledger.consume().groups == (*groups[filtered:], *fresh)


def test_L17_every_batch_is_whole_however_much_is_filtered() -> None:
    ledger = StalenessLedger(batch_size=3, max_staleness=2)
    finished = 0
    for batch in range(20):
        while not ledger.is_ready():
            for group in ledger.admit_many(batch, 99) or ledger.blockers()[:1]:
                ledger.complete(group)
                finished += 1
                if finished % 3:
                    ledger.filter(group, "no signal")
        assert len(ledger.consume().groups) == 3
        ledger.publish(batch + 1)
    statistics = ledger.statistics()
    assert statistics.trained == 60
    assert statistics.filtered["no signal"] >= 120
