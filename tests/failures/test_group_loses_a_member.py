"""A group is given up while its members are in every state: all of them end, and a whole group takes its place."""

import pytest
from support import Scripted, one_turn, routed_group

from staleflow import LLM, Config
from staleflow.events import Aborted, Admitted, Routed
from staleflow.testing import ScriptedEngine


@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_L13_abort_ends_every_member_dispatched_or_not(scripted: Scripted, capacity: int) -> None:
    ended: dict[int, int] = {}

    async def first_member_fails(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        if task % 4 == 1:
            ended[task] = ended.get(task, 0) + 1
            raise ValueError("malformed answer")
        return reward

    engine = ScriptedEngine(capacity=capacity)
    config = Config(steps=6, batch_size=2, group_size=5, max_attempts=1)
    run = scripted(config, rollout=first_member_fails, engines=[engine])
    report = run.run()
    assert report.accounting.aborted["failed"] == len(ended) >= 3
    if capacity == 1:
        assert set(ended.values()) == {1}, "a member of an aborted group went on"
    dead: set[int] = set()
    for event in run.events():
        match event:
            case Aborted(group=group):
                dead.add(group)
            case Routed():
                assert routed_group(event) not in dead
    assert all(len(group) == 5 for batch in run.trainer.batches for group in batch.groups)


def test_L13_the_replacement_is_a_new_group_of_full_size(scripted: Scripted) -> None:
    async def task_0_fails(task: int, llm: LLM) -> float:
        if task == 0:
            raise ValueError("malformed answer")
        return await one_turn(task, llm)

    config = Config(steps=2, batch_size=2, group_size=3, max_staleness=0, max_attempts=1)
    run = scripted(config, rollout=task_0_fails)
    run.run()
    assert [event.task for event in run.events_of(Admitted)] == [0, 1, 2, 3, 4]
    assert [[group[0].task for group in batch.groups] for batch in run.trainer.batches] == [[1, 2], [3, 4]]


def test_L13_aborted_members_free_their_engine(scripted: Scripted) -> None:
    async def fails_at_once_or_generates(task: int, llm: LLM) -> float:
        if task == 0 and not failed:
            failed.append(task)
            await llm.generate([1], max_new_tokens=1)
            raise ValueError("malformed answer")
        await llm.generate([1], max_new_tokens=2000 if task == 0 else 2)
        return 1.0

    failed: list[int] = []
    engine = ScriptedEngine(lambda request, rng: [0] * request.max_new_tokens, capacity=4)
    config = Config(steps=3, batch_size=1, group_size=4, max_attempts=1)
    report = scripted(config, rollout=fails_at_once_or_generates, engines=[engine]).run()
    assert report.wall_s < 5, "the engine stayed busy with requests nobody waited for"
