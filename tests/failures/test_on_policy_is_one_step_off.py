"""max_staleness = 0 is synchronous training: nothing starts between the hand-over of a batch and its publication."""

import asyncio

import pytest
from support import Scripted, between, one_turn

from staleflow import LLM, Config
from staleflow.events import Admitted, Consumed, Published, Routed, Synced
from staleflow.testing import ScriptedEngine, ScriptedTrainer

ENGINES = {
    "one": lambda: [ScriptedEngine()],
    "three": lambda: [ScriptedEngine(seed=n, token_s=0.01 * 4**n, update_s=0.3 * n + 0.01) for n in range(3)],
}


@pytest.mark.parametrize("fleet", ENGINES)
def test_V13_nothing_starts_between_hand_over_and_publication(scripted: Scripted, fleet: str) -> None:
    config = Config(steps=7, batch_size=4, group_size=2, max_staleness=0)
    run = scripted(config, engines=ENGINES[fleet](), trainer=ScriptedTrainer(step_s=1.0, publish_s=0.5))
    report = run.run()
    events = run.events()
    consumed, published = run.events_of(Consumed), run.events_of(Published)
    for start, end in zip(consumed, published, strict=True):
        assert not [event for event in between(events, start, end) if isinstance(event, Admitted | Routed)]
    for new, next_batch in zip(published, consumed[1:], strict=False):
        step = between(events, new, next_batch)
        first = next(event for event in step if isinstance(event, Admitted | Synced))
        assert isinstance(first, Synced), "a group started before its weights had arrived"
        assert {event.version for event in step if isinstance(event, Admitted)} == {new.version}
    assert report.staleness_histogram.keys() == {0}


@pytest.mark.parametrize("fleet", ENGINES)
def test_V13_order_of_data_is_that_of_a_synchronous_loop(scripted: Scripted, fleet: str) -> None:
    async def any_duration(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(task * 7 % 5)
        return reward

    config = Config(steps=6, batch_size=4, group_size=2, max_staleness=0)
    run = scripted(config, rollout=any_duration, engines=ENGINES[fleet]())
    run.run()
    trained = [[group[0].task for group in batch.groups] for batch in run.trainer.batches]
    assert trained == [list(range(4 * step, 4 * step + 4)) for step in range(6)]
    admitted = [event.group for event in run.events_of(Admitted)]
    assert [group for event in run.events_of(Consumed) for group in event.groups] == admitted


def test_V13_every_token_comes_from_the_weights_that_are_trained(scripted: Scripted) -> None:
    config = Config(steps=6, batch_size=3, group_size=2, max_staleness=0)
    run = scripted(config, engines=ENGINES["three"](), trainer=ScriptedTrainer(step_s=0.01))
    run.run()
    for batch in run.trainer.batches:
        assert {version for trajectory in batch.trajectories for version in trajectory.versions} == {batch.step}


def test_V13_failed_groups_are_replaced_within_the_step(scripted: Scripted) -> None:
    async def some_fail(task: int, llm: LLM) -> float:
        if task % 3 == 0:
            raise ValueError("no luck")
        return await one_turn(task, llm)

    config = Config(steps=5, batch_size=4, group_size=1, max_staleness=0, max_attempts=1)
    run = scripted(config, rollout=some_fail)
    run.run()
    trained = [group[0].task for batch in run.trainer.batches for group in batch.groups]
    assert trained == [task for task in range(100) if task % 3][:20]
