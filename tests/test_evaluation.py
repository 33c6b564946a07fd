"""Held-out tasks: they wait for room without running out of time, and leave training its own."""

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config
from staleflow.errors import TooManyFailuresError
from staleflow.events import Consumed, Evaluated
from staleflow.testing import ScriptedEngine

DEADLINE_S = 60.0


def slow_engine(capacity: int) -> ScriptedEngine:
    """About 8 s a request."""
    return ScriptedEngine(lambda request, rng: [1] * 8, token_s=1.0, capacity=capacity)


async def right(task: int, llm: LLM) -> float:
    await llm.generate([1], max_new_tokens=8)
    return 1.0


def test_deadline_of_a_held_out_rollout_does_not_run_while_it_queues(scripted: Scripted) -> None:
    config = Config(steps=1, batch_size=1, group_size=1, rollout_timeout_s=DEADLINE_S)
    run = scripted(config, rollout=right, held_out=range(48), engines=[slow_engine(2)])
    report = run.run()
    before, _ = run.events_of(Evaluated)
    assert before.t > 2 * DEADLINE_S, "the engine is fast enough for all of them at once"
    assert (report.accuracy_before, report.accuracy_after, report.held_out_failures) == (1.0, 1.0, 0)


def test_evaluation_before_training_uses_all_of_the_engines(scripted: Scripted) -> None:
    config = Config(steps=1, batch_size=1, group_size=1, rollout_timeout_s=DEADLINE_S)
    run = scripted(config, rollout=right, held_out=range(16), engines=[slow_engine(8), slow_engine(8)])
    run.run()
    assert run.events_of(Evaluated)[0].t < 2 * 8


def test_training_rollouts_do_not_run_out_of_time_beside_an_evaluation(scripted: Scripted) -> None:
    config = Config(
        steps=6, batch_size=2, group_size=2, rollout_timeout_s=DEADLINE_S, evaluate_every_steps=1, max_attempts=1
    )
    run = scripted(config, rollout=right, held_out=range(80), engines=[slow_engine(8)])
    report = run.run()
    assert report.accounting.failed_attempts == {}
    assert report.held_out_failures == 0
    during = run.events_of(Evaluated)[1]
    steps = [event for event in run.events_of(Consumed) if event.t < during.t]
    assert len(steps) >= 4, "training stood still while the evaluation went on"


async def no_sandbox(task: int, llm: LLM) -> float:
    """Held-out tasks are below 0, and all of them fail."""
    if task < 0:
        raise LookupError(f"no sandbox for {task}")
    return await one_turn(task, llm)


def test_all_held_out_rollouts_failing_ends_the_run(scripted: Scripted) -> None:
    run = scripted(Config(steps=3, batch_size=2, group_size=2), rollout=no_sandbox, held_out=[-1, -2, -3])
    error = run.fail(TooManyFailuresError)
    assert "3 of 3 held-out rollouts failed" in str(error)
    assert "LookupError: no sandbox for -1" in str(error)
    assert isinstance(error.__cause__, LookupError)
    assert str(error.__cause__) == "no sandbox for -1"
    assert run.events_of(Evaluated) == [], "an accuracy of failures means nothing"


def test_a_later_evaluation_may_end_the_run_too(scripted: Scripted) -> None:
    async def breaks(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        if task < 0 and len(run.trainer.batches) > 1:
            raise LookupError("the sandbox is gone")
        return reward

    run = scripted(
        Config(steps=50, batch_size=2, group_size=2, evaluate_every_steps=2), rollout=breaks, held_out=[-1, -2]
    )
    assert isinstance(run.fail(TooManyFailuresError).__cause__, LookupError)
    assert run.trainer.saved == [run.run_dir / "checkpoint"]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_failures_within_the_limit_earn_nothing_and_are_counted(scripted: Scripted, failing: int) -> None:
    async def rollout(task: int, llm: LLM) -> float:
        reward = await right(task, llm)
        if -failing <= task < 0:
            raise ValueError("malformed answer")
        return reward

    config = Config(steps=2, batch_size=1, group_size=1, max_failure_share=0.5)
    run = scripted(config, rollout=rollout, held_out=[-1, -2, -3, -4])
    if failing > 0.5 * 4:
        assert isinstance(run.fail(TooManyFailuresError).__cause__, ValueError)
        return
    report = run.run()
    assert [event.failed for event in run.events_of(Evaluated)] == [failing, failing]
    assert report.held_out_failures == 2 * failing
    assert report.accuracy_before == report.accuracy_after == 1 - failing / 4
    assert report.accounting.failed_attempts == {}, "those are of training"
