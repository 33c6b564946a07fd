"""One member is far older than the others: its group, their rewards and the baseline are trained all the same."""

import asyncio

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config
from staleflow.events import Aborted, Consumed, Filtered
from staleflow.testing import ScriptedEngine

GROUP_SIZE = 4


class OneIsOld:
    """Member 0 of task 2 samples at once and then works for long; member 1 fails first, so it is sampled much later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._plays = 0

    async def __call__(self, task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        if task == 2:
            self._plays += 1
            play = self._plays
            if play == 1:
                await asyncio.sleep(self._seconds)
            elif play == 2:
                await asyncio.sleep(0.7 * self._seconds)
                raise LookupError("no sandbox")
        return reward


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_B3_group_with_an_old_member_is_trained_whole_and_in_time(scripted: Scripted, max_staleness: int) -> None:
    config = Config(steps=10, batch_size=2, group_size=GROUP_SIZE, max_staleness=max_staleness)
    run = scripted(config, rollout=OneIsOld(3.0), engines=[ScriptedEngine(update_s=0.0)])
    report = run.run()
    [(step, group)] = [
        (batch.step, group) for batch in run.trainer.batches for group in batch.groups if group[0].task == 2
    ]
    assert [one.member for one in group] == list(range(GROUP_SIZE)), "the baseline is over all members"
    assert all(one.reward is not None and one.sampled_tokens > 0 for one in group)
    oldest, newest = min(min(one.versions) for one in group), max(max(one.versions) for one in group)
    assert oldest == 0 < newest, "one member is older than another"
    assert step == oldest + max_staleness, "it was late enough to be due, and was waited for"
    assert report.staleness_max == max_staleness
    # Everything that its group could have lost is there.
    assert (run.events_of(Aborted), run.events_of(Filtered)) == ([], [])
    assert report.trained_trajectories == config.steps * config.batch_size * GROUP_SIZE


def test_B3_its_batch_waits_and_no_other_group_is_given_up_for_it(scripted: Scripted) -> None:
    config = Config(steps=6, batch_size=2, group_size=GROUP_SIZE, max_staleness=1)
    run = scripted(config, rollout=OneIsOld(30.0))
    report = run.run()
    taken = {event.batch: event.t for event in run.events_of(Consumed)}
    assert taken[1] - taken[0] > 20.0
    assert report.accounting.trained == report.accounting.admitted
