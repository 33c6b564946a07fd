"""A ledger is restored after a crash: what was out stays out, so there is no burst of new groups."""

import pytest

from staleflow import StalenessLedger


def run_until(version: int, *, batch_size: int, max_staleness: int) -> StalenessLedger:
    """A ledger in the middle of a run: the window is full, half of it complete, one batch out for training."""
    ledger = StalenessLedger(batch_size=batch_size, max_staleness=max_staleness)
    for batch in range(version):
        ledger.admit_many(batch, ledger.capacity(batch))
        ledger.complete_many(ledger.blockers())
        ledger.consume()
        ledger.publish(batch + 1)
    ledger.admit_many(version, ledger.capacity(version))
    ledger.complete_many(ledger.blockers())
    ledger.consume()
    return ledger


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("version", [1, 7])
def test_V1_capacity_after_resume_is_capacity_before(version: int, max_staleness: int, batch_size: int) -> None:
    ledger = run_until(version, batch_size=batch_size, max_staleness=max_staleness)
    restored = StalenessLedger.restore(ledger.snapshot())
    for ours in (ledger, restored):
        assert [ours.capacity(engine) for engine in range(version + 2)] == [0] * (version + 2)
    for ours in (ledger, restored):
        ours.release(version)
    assert restored.capacity(version) == ledger.capacity(version) == 0


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("crashes", [1, 5])
def test_V1_no_burst_however_often_the_run_resumes(crashes: int, max_staleness: int) -> None:
    batch_size = 3
    ledger = run_until(6, batch_size=batch_size, max_staleness=max_staleness)
    for _ in range(crashes):
        ledger = StalenessLedger.restore(ledger.snapshot())
        ledger.admit_many(6, 10_000)
        statistics = ledger.statistics()
        # The lease is beside the window, which holds one batch for every version a group may wait.
        assert statistics.running + statistics.complete <= max_staleness * batch_size
        assert statistics.admitted <= (statistics.published + 1 + max_staleness) * batch_size


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_V1_lost_groups_are_aborted_and_replaced_one_for_one(max_staleness: int) -> None:
    """What was running died with the controller. Each group that is given up makes room for exactly one."""
    ledger = StalenessLedger(batch_size=2, max_staleness=max_staleness)
    running = ledger.admit_many(0, 99)
    ledger = StalenessLedger.restore(ledger.snapshot())
    for lost, group in enumerate(running):
        assert ledger.capacity(0) == lost
        ledger.abort(group, "lost in a crash")
    assert len(ledger.admit_many(0, 99)) == len(running)
