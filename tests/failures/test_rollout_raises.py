"""The user's function raises or returns nonsense: the trajectory fails, is counted and replaced."""

import asyncio
import math
from typing import Any

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config, ListTasks
from staleflow.errors import ContextError, TooManyFailuresError
from staleflow.events import Consumed, Failed


@pytest.mark.parametrize("max_attempts", [1, 3])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_H2_raising_rollout_is_counted_and_replaced(scripted: Scripted, max_staleness: int, max_attempts: int) -> None:
    async def every_fifth_raises(task: int, llm: LLM) -> float:
        if task % 5 == 0:
            raise KeyError("answer")
        return await one_turn(task, llm)

    config = Config(steps=6, batch_size=4, group_size=2, max_staleness=max_staleness, max_attempts=max_attempts)
    run = scripted(config, rollout=every_fifth_raises)
    report = run.run()
    assert report.steps == 6
    assert report.accounting.aborted["failed"] >= 5
    assert report.accounting.failed_attempts == {"KeyError": len(run.events_of(Failed))}
    replay = run.replay()
    assert all(replay.task[group] % 5 != 0 for group in replay.trained)


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1.0", [1.0], 1j])
def test_H2_reward_that_is_no_finite_number_fails_its_trajectory(scripted: Scripted, reward: Any) -> None:
    async def sometimes(task: int, llm: LLM) -> Any:
        good = await one_turn(task, llm)
        return reward if task == 2 else good

    report = scripted(Config(steps=3, batch_size=2, group_size=1, max_attempts=1), rollout=sometimes).run()
    assert report.accounting.failed_attempts == {"RewardError": 1}
    assert report.accounting.aborted["failed"] == 1


def test_H2_rollout_that_cancels_itself_fails_alone(scripted: Scripted) -> None:
    async def cancels_itself(task: int, llm: LLM) -> float:
        if task == 1:
            raise asyncio.CancelledError
        return await one_turn(task, llm)

    report = scripted(Config(steps=3, batch_size=2, group_size=2, max_attempts=1), rollout=cancels_itself).run()
    assert set(report.accounting.failed_attempts) == {"RolloutError"}


def test_H2_rollout_that_is_no_coroutine_fails_with_its_type_error(scripted: Scripted) -> None:
    def forgot_async(task: int, llm: LLM) -> Any:
        return 1.0

    error = scripted(Config(steps=3, batch_size=2, group_size=2), rollout=forgot_async).fail(TooManyFailuresError)
    assert isinstance(error.__cause__, TypeError)


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_H3_all_rollouts_failing_ends_the_run_with_the_first_traceback(scripted: Scripted, max_staleness: int) -> None:
    async def broken(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=1)
        raise LookupError(f"no sandbox for task {task}")

    run = scripted(Config(steps=3, batch_size=4, group_size=2, max_staleness=max_staleness), rollout=broken)
    error = run.fail(TooManyFailuresError)
    first = error.__cause__
    assert isinstance(first, LookupError)
    traceback = first.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback is not None
    assert traceback.tb_frame.f_code.co_name == "broken"
    assert str(first) in str(error)
    assert "32 of the last 32" in str(error)
    assert run.events_of(Consumed) == []


def test_H3_failures_below_the_limit_do_not_end_the_run(scripted: Scripted) -> None:
    count = 0

    async def two_in_five(task: int, llm: LLM) -> float:
        nonlocal count
        count += 1
        if count % 5 < 2:
            raise ValueError("bad luck")
        return await one_turn(task, llm)

    config = Config(steps=20, batch_size=4, group_size=2, max_attempts=100, max_failure_share=0.5)
    report = scripted(config, rollout=two_in_five).run()
    assert report.steps == 20
    assert report.accounting.aborted == {}
    assert report.accounting.failed_attempts["ValueError"] > 100


def test_H3_failures_above_the_limit_end_the_run_though_some_succeed(scripted: Scripted) -> None:
    count = 0

    async def two_in_five(task: int, llm: LLM) -> float:
        nonlocal count
        count += 1
        if count % 5 < 2:
            raise ValueError("bad luck")
        return await one_turn(task, llm)

    config = Config(steps=200, batch_size=4, group_size=2, max_attempts=100, max_failure_share=0.3)
    run = scripted(config, rollout=two_in_five)
    assert str(run.fail(TooManyFailuresError).__cause__) == "bad luck"


def test_all_tasks_fail_and_the_source_ends(scripted: Scripted) -> None:
    async def broken(task: int, llm: LLM) -> float:
        raise LookupError("no sandbox")

    config = Config(steps=3, batch_size=2, group_size=1, max_attempts=2)
    report = scripted(config, rollout=broken, tasks=ListTasks(range(5), epochs=1)).run()
    assert (report.ended, report.steps) == ("source_exhausted", 0)
    assert report.accounting.aborted == {"failed": 5}
    assert report.accounting.failed_attempts == {"LookupError": 10}


def test_source_that_raises_ends_the_run(scripted: Scripted) -> None:
    class Breaks(ListTasks[int]):
        async def next(self) -> Any:
            if self.cursor == 7:
                raise ConnectionError("task database went away")
            return await super().next()

    run = scripted(Config(steps=30, batch_size=2, group_size=2), tasks=Breaks(range(100)))
    assert str(run.fail(ConnectionError)) == "task database went away"


def test_trajectory_is_closed_once_its_reward_is_known(scripted: Scripted) -> None:
    """A call left running in the background must not add tokens to what is already in a batch."""

    async def leaves_a_call_behind(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=2)
        background.append(asyncio.ensure_future(llm.generate([2], max_new_tokens=500)))
        await asyncio.sleep(0)
        return 1.0

    background: list[asyncio.Future[Any]] = []
    config = Config(steps=3, batch_size=1, group_size=1, max_attempts=1)
    error = scripted(config, rollout=leaves_a_call_behind).fail(TooManyFailuresError)
    assert "still running" in str(error.__cause__)


def test_trajectory_that_ended_cannot_be_continued(scripted: Scripted) -> None:
    kept: list[LLM] = []

    async def continues_the_one_before(task: int, llm: LLM) -> float:
        if kept:
            with pytest.raises(ContextError, match="has ended"):
                await kept[-1].generate([2], max_new_tokens=5)
        reward = await one_turn(task, llm)
        kept.append(llm)
        return reward

    run = scripted(Config(steps=3, batch_size=1, group_size=1, max_staleness=0), rollout=continues_the_one_before)
    run.run()
    lengths = [len(trajectory.segments) for batch in run.trainer.batches for trajectory in batch.trajectories]
    assert lengths == [2, 2, 2]
