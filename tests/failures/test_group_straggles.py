"""One member holds a whole step (H4): what a straggler policy does about it, and that nothing does it silently."""

import asyncio

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config, StragglerPolicy, uniform_rewards
from staleflow.config import StragglerAction
from staleflow.errors import TruncatedError
from staleflow.events import Aborted, ClosedShort, Consumed, Truncated
from staleflow.testing import ScriptedEngine

HANG_S = 200.0
PATIENCE_S = 5.0


def config(action: StragglerAction, *, max_staleness: int = 2, max_blockers: int = 1) -> Config:
    policy = StragglerPolicy(action=action, patience_s=PATIENCE_S, max_blockers=max_blockers)
    return Config(steps=4, batch_size=2, group_size=2, max_staleness=max_staleness, stragglers=policy)


class HangsOnce:
    """A rollout whose first play of task 1 scores for ever."""

    def __init__(self) -> None:
        self.hung = False

    async def __call__(self, task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        if task == 1 and not self.hung:
            self.hung = True
            await asyncio.sleep(HANG_S)
        return reward


def test_H4_without_a_policy_the_batch_waits(scripted: Scripted) -> None:
    run = scripted(Config(steps=4, batch_size=2, group_size=2), rollout=HangsOnce())
    report = run.run()
    assert report.wall_s > HANG_S
    assert (report.accounting.closed_short, report.accounting.truncated) == (0, 0)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_H4_straggling_group_is_replaced(scripted: Scripted, max_staleness: int) -> None:
    run = scripted(config("replace", max_staleness=max_staleness), rollout=HangsOnce())
    report = run.run()
    assert report.wall_s < HANG_S
    assert report.accounting.aborted == {"straggler": 1}
    assert [event.reason for event in run.events_of(Aborted)] == ["straggler"]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_H4_straggling_group_is_closed_short(scripted: Scripted, max_staleness: int) -> None:
    run = scripted(config("close_short", max_staleness=max_staleness), rollout=HangsOnce())
    report = run.run()
    assert report.wall_s < HANG_S
    assert report.accounting.closed_short == 1
    (closed,) = run.events_of(ClosedShort)
    assert len(closed.members) == 1
    assert report.trained_trajectories == 4 * 2 * 2 - 1


def test_group_of_which_nobody_has_finished_is_not_closed_short(scripted: Scripted) -> None:
    async def all_hang(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(HANG_S if task == 1 else 0.0)
        return reward

    report = scripted(config("close_short"), rollout=all_hang).run()
    assert report.accounting.closed_short == 0
    assert report.wall_s > HANG_S


def test_group_closed_short_can_still_be_filtered(scripted: Scripted) -> None:
    run = scripted(config("close_short"), rollout=HangsOnce(), group_filter=uniform_rewards)
    report = run.run()
    assert report.accounting.closed_short == 1
    assert report.accounting.filtered["uniform_rewards"] >= 1


TOKENS = 4000
"""More than the engine samples in seconds of patience."""


def as_many_as_asked_for() -> ScriptedEngine:
    return ScriptedEngine(lambda request, rng: [1] * request.max_new_tokens)


class AsksForTooMuchOnce:
    """A rollout whose first play of task 1 asks for far more tokens than all others."""

    def __init__(self) -> None:
        self.asked = False
        self.reasons: list[str] = []

    async def __call__(self, task: int, llm: LLM) -> float:
        greedy = task == 1 and not self.asked
        self.asked |= greedy
        completion = await llm.generate([task % 10], max_new_tokens=TOKENS if greedy else 8)
        self.reasons.append(completion.finish_reason)
        return float(len(completion.token_ids))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_H4_straggling_request_is_truncated(scripted: Scripted, max_staleness: int) -> None:
    rollout = AsksForTooMuchOnce()
    run = scripted(config("truncate", max_staleness=max_staleness), rollout=rollout, engines=[as_many_as_asked_for()])
    report = run.run()
    assert report.accounting.truncated == len(run.events_of(Truncated)) == 1
    assert rollout.reasons.count("truncated") == 1
    assert report.trained_trajectories == 4 * 2 * 2
    trained = [trajectory for batch in run.trainer.batches for trajectory in batch.trajectories]
    (cut_short,) = [trajectory for trajectory in trained if trajectory.truncated]
    assert 8 < cut_short.sampled_tokens < TOKENS
    assert cut_short.reward == cut_short.sampled_tokens


def test_rollout_that_goes_on_after_truncation_is_told(scripted: Scripted) -> None:
    first_turn = AsksForTooMuchOnce()

    async def goes_on(task: int, llm: LLM) -> float:
        await first_turn(task, llm)
        try:
            await llm.generate([2], max_new_tokens=8)
        except TruncatedError:
            return 0.5
        return 1.0

    run = scripted(config("truncate"), rollout=goes_on, engines=[as_many_as_asked_for()])
    assert run.run().accounting.truncated == 1
    rewards = [trajectory.reward for batch in run.trainer.batches for trajectory in batch.trajectories]
    assert rewards.count(0.5) == 1


@pytest.mark.parametrize("max_blockers", [1, 2])
def test_policy_waits_while_the_batch_waits_for_more_groups(scripted: Scripted, max_blockers: int) -> None:
    async def two_hang(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(HANG_S if task < 2 else 0.0)
        return reward

    run = scripted(config("replace", max_blockers=max_blockers, max_staleness=0), rollout=two_hang)
    report = run.run()
    assert report.accounting.aborted.get("straggler", 0) == (2 if max_blockers == 2 else 0)


def test_patience_begins_again_for_every_batch_and_every_use(scripted: Scripted) -> None:
    async def every_fifth_hangs(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(HANG_S if task % 5 == 0 else 0.0)
        return reward

    run = scripted(config("replace", max_staleness=0), rollout=every_fifth_hangs)
    run.run()
    consumed = [event.t for event in run.events_of(Consumed)]
    for event in run.events_of(Aborted):
        before = max((t for t in consumed if t < event.t), default=0.0)
        assert event.t - before == pytest.approx(PATIENCE_S) or event.t - before > PATIENCE_S
