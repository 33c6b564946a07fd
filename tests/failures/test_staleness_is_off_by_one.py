"""The bound is exact, per token, queue time included: n - 1 and n are trained on, n + 1 never is."""

import asyncio
from collections import Counter

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config, RefusalReason, StalenessLedger
from staleflow._core import Refusal
from staleflow.events import Admitted, Finished, Published
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import StepMetrics, TrainBatch


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_V5_ledger_admits_up_to_the_bound_and_no_further(bound: int) -> None:
    ledger = StalenessLedger(batch_size=1, max_staleness=bound)
    for batch in range(bound + 3):
        ledger.complete_many(ledger.admit_many(batch, 1))
        ledger.consume()
        ledger.publish(batch + 1)
    newest = ledger.published
    for age in (bound - 1, bound):
        if age >= 0:
            group = ledger.admit(newest - age)
            assert isinstance(group, int)
            ledger.abort(group, "was only asked whether it may start")
    refusal = ledger.admit(newest - bound - 1)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.TOO_OLD


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_V5_ledger_lets_a_group_age_up_to_the_bound_and_then_waits(bound: int) -> None:
    ledger = StalenessLedger(batch_size=1, max_staleness=bound)
    slow, *others = ledger.admit_many(0, 99)
    assert len(others) == bound
    for batch, group in enumerate(others):
        ledger.complete(group)
        assert ledger.consume().groups == (group,)
        ledger.publish(batch + 1)
    assert ledger.next_batch == bound
    # Something newer is complete, but training on it now would push the slow group over the bound.
    assert ledger.capacity(bound) == bound
    if bound > 0:
        newer = ledger.admit(bound)
        assert isinstance(newer, int)
        ledger.complete(newer)
    assert not ledger.is_ready()
    assert ledger.blockers() == [slow]
    ledger.complete(slow)
    assert ledger.consume().groups == (slow,)


@pytest.mark.parametrize("bound", [2, 3, 5])
@pytest.mark.parametrize("late_by", [-1, 0, 1], ids=["n-1", "n", "n+1"])
def test_V5_rollout_that_lasts_for_about_the_bound(scripted: Scripted, bound: int, late_by: int) -> None:
    """The first group returns only after so many steps. One step beyond the bound, training waits for it instead,
    so it can only fail; what is played in its place is fresh."""
    enough = asyncio.Event()
    attempts: Counter[int] = Counter()

    class Counts(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepMetrics:
            metrics = await super().step(batch)
            if len(self.batches) == bound + late_by:
                enough.set()
            return metrics

    async def rollout(task: int, llm: LLM) -> float:
        attempts[task] += 1
        reward = await one_turn(task, llm)
        if task == 0 and attempts[task] == 1 and bound + late_by > 0:
            await enough.wait()
        return reward

    trainer = Counts()
    config = Config(steps=bound + 4, batch_size=1, group_size=1, max_staleness=bound, rollout_timeout_s=100)
    run = scripted(config, rollout=rollout, trainer=trainer)
    report = run.run()
    [(batch, trajectory)] = [(b, t) for b in trainer.batches for t in b.trajectories if t.task == 0]
    gap = batch.step - min(trajectory.versions)
    if late_by == 1:
        assert report.accounting.failed_attempts == {"RolloutTimeoutError": 1}
        assert min(trajectory.versions) == bound
        assert gap <= bound
    else:
        assert report.accounting.failed_attempts == {}
        assert gap == bound + late_by


def test_V6_time_in_the_queue_counts(scripted: Scripted) -> None:
    run = scripted(Config(steps=8, batch_size=2, group_size=2, max_staleness=4), trainer=ScriptedTrainer(step_s=5.0))
    report = run.run()
    in_flight = Counter[int]()
    published = 0
    for event in run.events():
        match event:
            case Published(version=version):
                published = version
            case Finished(versions=(oldest, _)):
                in_flight[published - oldest] += 1
    assert max(in_flight) <= 1, "generation is fast here: all the rest is waiting"
    assert report.staleness_max == 4


def test_V6_every_trained_token_is_counted_once_with_its_own_version(scripted: Scripted) -> None:
    engines = [ScriptedEngine(seed=1, token_s=0.05), ScriptedEngine(seed=2, token_s=0.2, update_s=0.5)]
    config = Config(steps=10, batch_size=3, group_size=2, max_staleness=3)
    run = scripted(config, engines=engines, trainer=ScriptedTrainer(step_s=0.1))
    report = run.run()
    expected = Counter(
        batch.step - version for batch in run.trainer.batches for t in batch.trajectories for version in t.versions
    )
    assert len(expected) > 2
    assert report.staleness_histogram == dict(expected)
    assert report.staleness_mean == pytest.approx(sum(gap * n for gap, n in expected.items()) / expected.total())
    assert report.staleness_max == max(expected)


def test_V9_staleness_counts_from_the_first_token_not_from_completion(scripted: Scripted) -> None:
    async def pauses(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=1)
        await asyncio.sleep(2.0)
        await llm.generate([2], max_new_tokens=1)
        return 1.0

    config = Config(steps=12, batch_size=2, group_size=1, max_staleness=3)
    trainer = ScriptedTrainer(step_s=0.3)
    run = scripted(config, rollout=pauses, trainer=trainer)
    run.run()
    versions = {event.group: event.versions for event in run.events_of(Finished)}
    spanning = [group for group, (oldest, newest) in versions.items() if newest > oldest]
    assert spanning, "no trajectory spans two versions"
    batch_of = {group[0].group: batch.step for batch in trainer.batches for group in batch.groups}
    assert max(batch_of[group] - versions[group][0] for group in batch_of) == 3
    admitted = {event.group: event.version for event in run.events_of(Admitted)}
    assert all(oldest >= admitted[group] for group, (oldest, _) in versions.items())
    for batch in trainer.batches:
        for trajectory in batch.trajectories:
            assert trajectory.first_segment_s is not None
            assert trajectory.finished_s is not None
            assert trajectory.admitted_s < trajectory.first_segment_s <= trajectory.finished_s - 2.0
