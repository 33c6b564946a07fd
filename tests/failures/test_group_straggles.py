"""One member holds a whole step (H4): what a straggler policy does about it, and that nothing does it silently."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config, ListTasks, StragglerPolicy, Task, Trajectory, uniform_rewards
from staleflow.config import StragglerAction
from staleflow.errors import TruncatedError
from staleflow.events import Aborted, ClosedShort, Truncated
from staleflow.testing import ScriptedEngine

HANG_S = 200.0
PATIENCE_S = 5.0


def config(action: StragglerAction, *, max_staleness: int = 2, max_blockers: int = 1, group_size: int = 2) -> Config:
    policy = StragglerPolicy(action=action, patience_s=PATIENCE_S, max_blockers=max_blockers)
    return Config(steps=4, batch_size=2, group_size=group_size, max_staleness=max_staleness, stragglers=policy)


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
    run = scripted(config("close_short", max_staleness=max_staleness, group_size=3), rollout=HangsOnce())
    report = run.run()
    assert report.wall_s < HANG_S
    assert report.accounting.closed_short == 1
    (closed,) = run.events_of(ClosedShort)
    assert len(closed.members) == 2
    assert report.trained_trajectories == 4 * 2 * 3 - 1


def test_group_with_one_finished_member_is_not_closed_short(scripted: Scripted) -> None:
    """It has nothing to be compared with, and so nothing to teach."""
    report = scripted(config("close_short", group_size=2), rollout=HangsOnce()).run()
    assert report.accounting.closed_short == 0
    assert report.wall_s > HANG_S


def test_group_closed_short_can_still_be_filtered(scripted: Scripted) -> None:
    async def same(task: int, llm: LLM) -> float:
        await hangs(task, llm)
        return 1.0

    hangs = HangsOnce()
    filters: list[str | None] = []

    def first_only(group: Sequence[Trajectory]) -> str | None:
        filters.append(uniform_rewards(group) if len(group) == 2 else None)
        return filters[-1]

    run = scripted(config("close_short", group_size=3), rollout=same, group_filter=first_only)
    report = run.run()
    assert report.accounting.closed_short == 1
    assert report.accounting.filtered == {"uniform_rewards": 1}


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


def test_rollout_of_many_turns_comes_to_its_reward_once_truncated(scripted: Scripted) -> None:
    first_turn = AsksForTooMuchOnce()

    async def three_turns(task: int, llm: LLM) -> float:
        await first_turn(task, llm)
        answers = [await llm.generate([2], max_new_tokens=8) for _ in range(2)]
        return float(sum(len(answer.token_ids) for answer in answers))

    run = scripted(config("truncate"), rollout=three_turns, engines=[as_many_as_asked_for()])
    report = run.run()
    assert report.accounting.truncated == 1
    assert report.accounting.failed_attempts == {}
    trained = [trajectory for batch in run.trainer.batches for trajectory in batch.trajectories]
    assert [trajectory.reward for trajectory in trained if trajectory.truncated] == [0.0]
    assert {trajectory.reward for trajectory in trained if not trajectory.truncated} == {16.0}


def test_rollout_that_asks_for_ever_once_truncated_fails(scripted: Scripted) -> None:
    first_turn = AsksForTooMuchOnce()

    async def asks_until_answered(task: int, llm: LLM) -> float:
        await first_turn(task, llm)
        while not (await llm.generate([2], max_new_tokens=8)).token_ids:
            continue
        return 1.0

    run = scripted(config("truncate"), rollout=asks_until_answered, engines=[as_many_as_asked_for()])
    report = run.run()
    assert report.accounting.failed_attempts == {TruncatedError.__name__: 1}
    assert report.accounting.truncated == 1


@pytest.mark.parametrize("action", ["replace", "truncate", "close_short"])
def test_members_are_hurried_once(scripted: Scripted, action: StragglerAction) -> None:
    """An engine that does not stop when it is told to is not told again and again."""

    class Deaf(ScriptedEngine):
        async def interrupt(self, request_id: str) -> None:
            pass

    async def slow(task: int, llm: LLM) -> float:
        return float(len((await llm.generate([task % 10], max_new_tokens=4000 if task == 1 else 8)).token_ids))

    engine = Deaf(lambda request, rng: [1] * request.max_new_tokens)
    report = scripted(config(action, max_staleness=0), rollout=slow, engines=[engine]).run()
    accounting = report.accounting
    uses = {"replace": accounting.aborted.get("straggler", 0), "truncate": accounting.truncated, "close_short": 0}
    assert uses[action] == {"replace": 1, "truncate": 2, "close_short": 0}[action]


def test_group_is_not_replaced_without_a_task_to_replace_it_by(scripted: Scripted) -> None:
    async def second_is_slow(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(3 * PATIENCE_S if task == 1 else 0.0)
        return reward

    tasks = ListTasks(range(4), epochs=1, seed=None)
    report = scripted(config("replace"), tasks=tasks, rollout=second_is_slow).run()
    assert (report.ended, report.steps) == ("source_exhausted", 2)
    assert report.accounting.aborted == {}


def test_groups_that_are_all_slow_are_not_replaced_for_ever(scripted: Scripted) -> None:
    async def slow(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(2 * PATIENCE_S)
        return reward

    report = scripted(config("replace", max_blockers=2), rollout=slow).run()
    assert report.steps == 4
    assert report.accounting.aborted["straggler"] <= 4 * 2


def test_young_group_is_no_straggler(scripted: Scripted) -> None:
    async def first_fails_late(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        if task == 1:
            await asyncio.sleep(0.9 * PATIENCE_S)
            raise ValueError("late")
        await asyncio.sleep(0.5 * PATIENCE_S)
        return reward

    # Its replacement has hardly begun when the trainer's patience ends for the first time.
    patient = msgspec.structs.replace(config("replace", max_staleness=0), max_attempts=1)
    report = scripted(patient, rollout=first_fails_late).run()
    assert report.accounting.aborted == {"failed": 1}


def test_policy_does_nothing_while_groups_are_missing(scripted: Scripted) -> None:
    """With too few groups admitted, the ones that run are not what the batch waits for."""

    class Dripping:
        def __init__(self) -> None:
            self.handed_out = 0

        async def next(self) -> Task[int]:
            await asyncio.sleep(3 * PATIENCE_S if self.handed_out else 0.0)
            self.handed_out += 1
            return Task(self.handed_out - 1, self.handed_out - 1)

    async def first_is_long(task: int, llm: LLM) -> float:
        tokens = TOKENS if task == 0 else 8
        return float(len((await llm.generate([task % 10], max_new_tokens=tokens)).token_ids))

    rules = config("truncate", group_size=1, max_staleness=0)
    run = scripted(rules, tasks=Dripping(), rollout=first_is_long, engines=[as_many_as_asked_for()])
    run.run()
    [truncated] = run.events_of(Truncated)
    assert truncated.t >= 3 * PATIENCE_S


@pytest.mark.parametrize("max_blockers", [1, 2])
def test_policy_waits_while_the_batch_waits_for_more_groups(scripted: Scripted, max_blockers: int) -> None:
    async def two_hang(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(HANG_S if task < 2 else 0.0)
        return reward

    run = scripted(config("replace", max_blockers=max_blockers, max_staleness=0), rollout=two_hang)
    report = run.run()
    assert report.accounting.aborted.get("straggler", 0) == (2 if max_blockers == 2 else 0)


def test_policy_is_consulted_every_patience_s(scripted: Scripted) -> None:
    async def tasks_hang(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        await asyncio.sleep(HANG_S if task in (0, 1, 2) else 0.0)
        return reward

    run = scripted(config("replace", max_blockers=3, max_staleness=0), rollout=tasks_hang)
    run.run()
    # One task is at hand at a time, so the first two take two uses; the third is the replacement of one of them.
    assert [event.t for event in run.events_of(Aborted)] == pytest.approx([PATIENCE_S * n for n in (1, 2, 3)], abs=0.5)
