"""More groups and members than are trained: what it saves, and what it costs."""

import asyncio
from typing import Any

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config, uniform_rewards
from staleflow.events import Admitted, Consumed, Dropped, Expired
from staleflow.testing import ScriptedEngine, ScriptedTrainer

NEVER_S = 500.0


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_hung_member_of_a_redundant_group_delays_nobody(scripted: Scripted, max_staleness: int) -> None:
    hung: list[int] = []

    async def last_of_each_task_hangs(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        hung.append(task)
        if hung.count(task) == 3:
            await asyncio.sleep(NEVER_S)
        return reward

    config = Config(steps=5, batch_size=2, group_size=2, extra_members=1, max_staleness=max_staleness)
    run = scripted(config, rollout=last_of_each_task_hangs)
    report = run.run()
    assert report.trained_trajectories == 5 * 2 * 2
    assert report.wall_s < NEVER_S


def test_members_that_are_not_needed_free_their_engine(scripted: Scripted) -> None:
    engine = ScriptedEngine(capacity=6)
    run = scripted(Config(steps=10, batch_size=2, group_size=2, extra_members=1), engines=[engine])
    run.run()
    assert len(run.events_of(Dropped)) > 0


@pytest.mark.parametrize(("failing", "aborted"), [(1, 0), (2, 1)])
def test_redundant_members_make_up_for_failures(scripted: Scripted, failing: int, aborted: int) -> None:
    """A group is given up only when too few of its members are left."""
    attempts: list[int] = []

    async def first_members_fail(task: int, llm: LLM) -> float:
        attempts.append(task)
        if task == 0 and attempts.count(0) <= failing:
            raise ValueError("no")
        return await one_turn(task, llm)

    config = Config(steps=2, batch_size=2, group_size=2, extra_members=1, max_attempts=1)
    report = scripted(config, rollout=first_members_fail).run()
    assert report.accounting.aborted.get("failed", 0) == aborted
    assert report.accounting.failed_attempts == {"ValueError": failing}


def test_groups_left_behind_expire_and_are_counted(scripted: Scripted) -> None:
    async def some_are_slow(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(NEVER_S if task % 4 == 3 else 0.0)
        return reward

    config = Config(steps=10, batch_size=3, group_size=2, extra_groups=1, max_staleness=0)
    run = scripted(config, rollout=some_are_slow, trainer=ScriptedTrainer(step_s=0.01))
    report = run.run()
    assert report.accounting.expired == len(run.events_of(Expired)) == 10
    assert report.wall_s < NEVER_S
    for consumed, next_one in zip(run.events_of(Consumed), run.events_of(Consumed)[1:], strict=False):
        admitted = [event for event in run.events_of(Admitted) if consumed.t < event.t < next_one.t]
        assert len(admitted) == 4, "places of expired groups are free at once"


@pytest.mark.parametrize("extra", [{"extra_groups": 2}, {"extra_members": 2}, {"extra_groups": 1, "extra_members": 1}])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_laws_hold_whatever_is_redundant(scripted: Scripted, extra: dict[str, Any], max_staleness: int) -> None:
    config = Config(steps=30, batch_size=3, group_size=2, max_staleness=max_staleness, **extra)
    engines = [ScriptedEngine(seed=1, capacity=9), ScriptedEngine(seed=2, capacity=9, update_s=0.5)]
    report = scripted(config, engines=engines, group_filter=uniform_rewards).run()
    assert report.steps == 30
