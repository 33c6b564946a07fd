"""The source of tasks ends: the run ends with it, and waits for nothing that nobody will bring."""

from collections.abc import Sequence

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config, ListTasks, Trajectory
from staleflow.events import Admitted


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("tasks", [1, 4, 7])
def test_H13_nothing_in_flight_after_the_last_task_ends_the_run(
    scripted: Scripted, tasks: int, max_staleness: int
) -> None:
    def nothing(group: Sequence[Trajectory]) -> str:
        return "no signal"

    config = Config(steps=50, batch_size=2, group_size=2, max_staleness=max_staleness)
    run = scripted(config, tasks=ListTasks(range(tasks), epochs=1), group_filter=nothing)
    report = run.run()
    assert (report.ended, report.steps) == ("source_exhausted", 0)
    assert report.accounting.filtered == {"no signal": tasks}
    assert report.wall_s < 60, "the run waited for a task that could not come"


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_H13_last_groups_that_all_fail_end_the_run(scripted: Scripted, max_staleness: int) -> None:
    async def last_two_fail(task: int, llm: LLM) -> float:
        if task >= 4:
            raise ValueError("malformed answer")
        return await one_turn(task, llm)

    config = Config(steps=50, batch_size=2, group_size=1, max_staleness=max_staleness, max_attempts=1)
    run = scripted(config, tasks=ListTasks(range(6), epochs=1), rollout=last_two_fail)
    report = run.run()
    assert (report.ended, report.steps) == ("source_exhausted", 2)
    assert report.accounting.aborted == {"failed": 2}
    assert len(run.events_of(Admitted)) == 6
