"""A rollout never returns: its deadline ends it, and everything that waited for it goes on."""

import asyncio

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config
from staleflow.errors import RolloutTimeoutError, TooManyFailuresError
from staleflow.events import Aborted, Failed
from staleflow.testing import ScriptedTrainer


async def hang() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_H1_hung_rollout_releases_its_slot(scripted: Scripted, max_staleness: int) -> None:
    async def hangs_on_task_3(task: int, llm: LLM) -> float:
        if task == 3:
            await hang()
        return await one_turn(task, llm)

    config = Config(
        steps=5, batch_size=2, group_size=2, max_staleness=max_staleness, rollout_timeout_s=10, max_attempts=2
    )
    run = scripted(config, rollout=hangs_on_task_3)
    report = run.run()
    assert report.steps == 5
    assert report.accounting.aborted["failed"] == 1
    # One member reaches its last attempt first; the group is then given up, and the other member with it.
    assert report.accounting.failed_attempts == {"RolloutTimeoutError": 3}
    [aborted] = [event for event in run.events_of(Aborted) if event.reason == "failed"]
    assert run.replay().task[aborted.group] == 3


def test_H1_hang_that_passes_is_played_again(scripted: Scripted) -> None:
    hung: set[int] = set()

    async def hangs_once(task: int, llm: LLM) -> float:
        if task % 4 == 0 and task not in hung:
            hung.add(task)
            await hang()
        return await one_turn(task, llm)

    run = scripted(Config(steps=4, batch_size=4, group_size=1, rollout_timeout_s=5), rollout=hangs_once)
    report = run.run()
    assert report.accounting.aborted == {}
    assert report.accounting.failed_attempts == {"RolloutTimeoutError": len(hung)}
    failed = {(event.group, event.attempt) for event in run.events_of(Failed)}
    trained = [trajectory for batch in run.trainer.batches for trajectory in batch.trajectories]
    assert {(t.group, t.attempt - 1) for t in trained if t.attempt > 0} == failed


def test_H1_hang_that_cannot_be_cancelled_delays_nobody(scripted: Scripted) -> None:
    stubborn = 0

    async def ignores_cancellation(task: int, llm: LLM) -> float:
        nonlocal stubborn
        if task == 1:
            for _ in range(3):
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    stubborn += 1
        return await one_turn(task, llm)

    config = Config(steps=5, batch_size=2, group_size=1, rollout_timeout_s=5, max_attempts=1)
    run = scripted(config, rollout=ignores_cancellation)
    report = run.run()
    assert report.accounting.failed_attempts == {"RolloutTimeoutError": 1}
    assert report.wall_s < 20
    assert stubborn > 0


def test_H1_every_rollout_hangs(scripted: Scripted) -> None:
    async def hangs(task: int, llm: LLM) -> float:
        await hang()
        return 0.0

    run = scripted(Config(steps=5, batch_size=2, group_size=2, rollout_timeout_s=5), rollout=hangs)
    error = run.fail(TooManyFailuresError)
    assert isinstance(error.__cause__, RolloutTimeoutError)


def test_H15_abort_does_not_wait_for_a_slow_judge(scripted: Scripted) -> None:
    """One member fails for good while its siblings wait for a judge that needs an hour."""

    async def slow_judge(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        if task == 0:
            if llm is first_of_task_0.setdefault(0, llm):
                raise ValueError("malformed answer")
            await asyncio.sleep(3600)
        return reward

    first_of_task_0: dict[int, LLM] = {}
    config = Config(steps=3, batch_size=1, group_size=4, max_attempts=1, rollout_timeout_s=10_000)
    report = scripted(config, rollout=slow_judge, trainer=ScriptedTrainer(step_s=0.1)).run()
    assert report.accounting.aborted["failed"] == 1
    assert report.wall_s < 10
