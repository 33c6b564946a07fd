"""A filter takes groups out: their places are free again at once, and no batch is short or empty."""

from collections.abc import Sequence

import pytest
from support import Scripted

from staleflow import Config, StalenessLedger, Trajectory
from staleflow.events import Consumed, Filtered


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_L15_filtered_group_returns_its_place(max_staleness: int) -> None:
    ledger = StalenessLedger(batch_size=3, max_staleness=max_staleness)
    room = ledger.capacity(0)
    for _ in range(50):
        groups = ledger.admit_many(0, room)
        assert ledger.capacity(0) == 0
        ledger.complete_many(groups)
        for group in groups:
            ledger.filter(group, "no signal")
        assert ledger.capacity(0) == room


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_L15_run_goes_on_however_much_is_filtered(scripted: Scripted, max_staleness: int) -> None:
    def nine_in_ten(group: Sequence[Trajectory]) -> str | None:
        return None if group[0].task % 10 == 0 else "not today"

    config = Config(steps=6, batch_size=3, group_size=2, max_staleness=max_staleness)
    run = scripted(config, group_filter=nine_in_ten)
    report = run.run()
    assert report.steps == 6
    assert report.accounting.filtered["not today"] >= 9 * 17
    trained = [[group[0].task for group in batch.groups] for batch in run.trainer.batches]
    assert all(task % 10 == 0 for batch in trained for task in batch)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_L16_dropping_every_sample_of_a_step_is_refilled(scripted: Scripted, max_staleness: int) -> None:
    def first_twenty(group: Sequence[Trajectory]) -> str | None:
        return "warm-up" if group[0].task < 20 else None

    config = Config(steps=3, batch_size=4, group_size=2, max_staleness=max_staleness)
    run = scripted(config, group_filter=first_twenty)
    report = run.run()
    assert report.accounting.filtered == {"warm-up": 20}
    assert [len(event.groups) for event in run.events_of(Consumed)] == [4, 4, 4]
    events = run.events()
    last_filtered = max(events.index(event) for event in run.events_of(Filtered))
    if max_staleness == 0:
        assert last_filtered < events.index(run.events_of(Consumed)[0])
