"""An attempt is given up for lost and played again, and then both answer."""

import pytest

from staleflow import StalenessLedger
from staleflow.errors import WrongStateError


@pytest.fixture
def ledger() -> StalenessLedger:
    """Group 1 of two members. Member 1 is on its second attempt."""
    ledger = StalenessLedger(batch_size=1, max_staleness=1, group_size=2)
    ledger.admit(0)
    assert ledger.start_member(1, 1, 0) is None
    assert ledger.start_member(1, 1, 0) is None
    return ledger


def late(ledger: StalenessLedger) -> int:
    return ledger.statistics().late_completions


@pytest.mark.parametrize("first", ["the one given up", "the one that counts"])
def test_L11_first_valid_result_wins_in_either_order(ledger: StalenessLedger, first: str) -> None:
    attempts = [0, 1] if first == "the one given up" else [1, 0]
    ledger.finish_member(1, 0, min_version=0)
    completed = [ledger.finish_member(1, 1, min_version=0, attempt=attempt) for attempt in attempts]
    assert completed == [attempt == 1 for attempt in attempts]
    assert late(ledger) == 1
    assert ledger.consume().groups == (1,)


def test_L11_late_results_are_ignored_and_counted_whatever_became_of_the_group(ledger: StalenessLedger) -> None:
    ledger.complete(1)
    assert ledger.finish_member(1, 1, attempt=0) is False
    ledger.consume()
    assert ledger.finish_member(1, 1, attempt=0) is False
    ledger.publish(1)
    for attempt in (0, 1):
        assert ledger.finish_member(1, 1, attempt=attempt) is False
    aborted = ledger.admit(1)
    assert isinstance(aborted, int)
    ledger.abort(aborted, "timed out")
    assert ledger.finish_member(aborted, 0) is False
    statistics = ledger.statistics()
    assert statistics.late_completions == 5
    assert (statistics.trained, statistics.aborted) == (1, {"timed out": 1})
    assert statistics.accounting_holds


def test_L11_late_result_changes_nothing_but_its_count(ledger: StalenessLedger) -> None:
    twin = StalenessLedger.restore(ledger.snapshot())
    ledger.finish_member(1, 1, min_version=0, attempt=0)
    assert late(ledger) == 1
    for ours in (ledger, twin):
        assert not ours.finish_member(1, 1, min_version=0, attempt=1)
        assert ours.finish_member(1, 0)
    assert ledger.consume() == twin.consume()


def test_L11_same_attempt_twice_is_an_error_of_the_caller(ledger: StalenessLedger) -> None:
    ledger.finish_member(1, 1, attempt=1)
    before = ledger.snapshot()
    with pytest.raises(WrongStateError):
        ledger.finish_member(1, 1, attempt=1)
    assert ledger.snapshot() == before
