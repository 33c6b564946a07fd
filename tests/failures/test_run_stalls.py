"""No step comes any more, and nothing has failed: the run says what it waits for, and goes on waiting."""

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest
from support import Scripted, ScriptedRun, one_turn, virtually

from staleflow import LLM, Config, ListTasks, Task, TaskSource, Trajectory
from staleflow.errors import ConfigError
from staleflow.events import Admitted, Published
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest

CONFIG = Config(steps=9, batch_size=2, group_size=2, rollout_timeout_s=10_000)
STALL_WARNING_S = CONFIG.stall_warning_s
IMPATIENT = msgspec.structs.replace(CONFIG, stall_warning_s=8.0)


def warnings_of(run: ScriptedRun, caplog: pytest.LogCaptureFixture, seconds: float) -> list[str]:
    """What the run warns of in its first virtual seconds."""

    async def main() -> None:
        async with asyncio.timeout(seconds):
            await run.pipeline.run()

    caplog.set_level("WARNING", "staleflow")
    with pytest.raises(TimeoutError):
        virtually(main())
    run.check_wound_down()
    return [record.getMessage() for record in caplog.records if record.name == "staleflow"]


class NeverAnswers(TaskSource[int]):
    async def next(self) -> Task[int] | None:
        await asyncio.Event().wait()
        return None


def test_task_source_that_never_answers(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    [warning] = warnings_of(scripted(CONFIG, tasks=NeverAnswers()), caplog, STALL_WARNING_S + 1)
    assert "batch 0 waits for groups not yet admitted" in warning
    assert "the task source is awaited" in warning


def test_filter_that_takes_out_every_group(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    def too_easy(group: Sequence[Trajectory]) -> str:
        return "too_easy"

    run = scripted(CONFIG, group_filter=too_easy, engines=[ScriptedEngine(token_s=1.0)])
    # What is thrown away counts until it is; after some seconds no more is finished at one time than ever before.
    [warning] = warnings_of(run, caplog, 1.5 * STALL_WARNING_S)
    assert "groups filtered so far: {'too_easy': " in warning
    assert "a task is at hand" in warning


def test_rollouts_that_fail_again_and_again_are_counted(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    async def fails(task: int, llm: LLM) -> float:
        await asyncio.sleep(50)
        raise ValueError("malformed answer")

    config = Config(steps=1, batch_size=1, group_size=1, max_staleness=0)
    [warning] = warnings_of(scripted(config, rollout=fails), caplog, STALL_WARNING_S + 1)
    assert "attempts failed so far: 2" in warning


def test_warned_of_again_whenever_it_has_lasted_twice_as_long(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = warnings_of(scripted(IMPATIENT, tasks=NeverAnswers()), caplog, 8 * IMPATIENT.stall_warning_s - 1)
    told = [f"nothing has completed for {times * IMPATIENT.stall_warning_s:.1f} s" for times in (1, 2, 4)]
    assert [warning.split(":")[0] for warning in warnings] == told


def test_report_is_in_the_run_folder_with_the_stacks_of_tasks_and_threads_and_says_when_it_is_over(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    async def waits_long(task: int, llm: LLM) -> float:
        if task == 5:
            await asyncio.sleep(3 * IMPATIENT.stall_warning_s)
        return await one_turn(task, llm)

    run = scripted(IMPATIENT, rollout=waits_long)
    run.run()
    first, second, over = (record.getMessage() for record in caplog.records)
    [report] = run.run_dir.glob("stalls/*-nothing-completes.txt")
    assert report.read_text() == first + second + over
    stacks = first.split("# tasks of the event loop")[1]
    tasks, threads = stacks.split("# threads")
    assert "waits_long" in tasks
    # From what is awaited up to the task's own function, by way of everything in between.
    assert tasks.index("in play") < tasks.index("in Members.play_task") < tasks.index("in Members._play_member")
    assert "member 0" in tasks
    assert "in thread_stacks" in threads
    assert over.startswith("over: the run goes on, after 2")


def test_slow_trajectories_that_finish_one_after_the_other_are_no_stall(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    async def one_at_a_time(task: int, llm: LLM) -> float:
        async with turn:
            await asyncio.sleep(0.9 * IMPATIENT.stall_warning_s)
            return await one_turn(task, llm)

    turn = asyncio.Lock()
    run = scripted(msgspec.structs.replace(IMPATIENT, batch_size=4, group_size=4), rollout=one_at_a_time)
    assert warnings_of(run, caplog, 10 * IMPATIENT.stall_warning_s) == []


def test_slow_run_is_no_stalled_run(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    run = scripted(CONFIG, trainer=ScriptedTrainer(step_s=0.8 * STALL_WARNING_S))
    assert warnings_of(run, caplog, 4 * STALL_WARNING_S) == []
    assert len(run.events_of(Published)) > 1


def test_source_without_more_is_not_awaited(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    async def hangs(task: int, llm: LLM) -> float:
        await asyncio.Event().wait()
        return 0.0

    run = scripted(CONFIG, rollout=hangs, tasks=ListTasks([1, 2], epochs=1))
    [warning] = warnings_of(run, caplog, STALL_WARNING_S + 1)
    assert "the task source has no more" in warning


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_H1_stalled_run_names_the_groups_it_waits_for(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, max_staleness: int
) -> None:
    async def hangs_on_task_5(task: int, llm: LLM) -> float:
        if task == 5:
            await asyncio.Event().wait()
        return await one_turn(task, llm)

    config = Config(steps=9, batch_size=2, group_size=2, max_staleness=max_staleness, rollout_timeout_s=10_000)
    run = scripted(config, rollout=hangs_on_task_5)
    [warning] = warnings_of(run, caplog, 2 * STALL_WARNING_S)
    [hung] = [event.group for event in run.events_of(Admitted) if event.task == 5]
    batch = len(run.events_of(Published))
    assert f"batch {batch} waits for group {hung}: member 0 in the rollout function since" in warning
    assert "0 requests run and 0 wait for an engine" in warning


def blockers_after(run: ScriptedRun, seconds: float) -> list[str]:
    async def main() -> list[str]:
        running = asyncio.ensure_future(run.pipeline.run())
        await asyncio.sleep(seconds)
        blockers = [str(blocker) for blocker in run.pipeline.blockers()]
        running.cancel()
        await asyncio.wait({running})
        return blockers

    return virtually(main())


@pytest.mark.parametrize(
    ("capacity", "told"),
    [
        (64, "batch 0 waits for group 1: member 0 running on engine 0 since 0.0 s"),
        (1, "batch 0 waits for group 1: member 1 waiting for an engine since 0.0 s"),
    ],
)
def test_blockers_say_what_their_members_are_doing(scripted: Scripted, capacity: int, told: str) -> None:
    def endless(request: GenerateRequest, rng: random.Random) -> list[int]:
        return [1] * 4000

    async def asks_for_all(task: int, llm: LLM) -> float:
        await llm.generate([task], max_new_tokens=4000)
        return 1.0

    config = Config(steps=1, batch_size=1, group_size=3, max_staleness=0)
    run = scripted(config, rollout=asks_for_all, engines=[ScriptedEngine(endless, capacity=capacity)])

    with pytest.raises(ConfigError, match="has not begun"):
        run.pipeline.blockers()
    assert blockers_after(run, 5.0) == [told]


def test_blockers_in_the_rollout_function_are_told_since_their_last_answer(scripted: Scripted) -> None:
    async def judges_for_ever(task: int, llm: LLM) -> float:
        await asyncio.sleep(3.0)
        await llm.generate([task], max_new_tokens=1)
        await asyncio.Event().wait()
        return 1.0

    config = Config(steps=1, batch_size=1, group_size=1, max_staleness=0)
    run = scripted(config, rollout=judges_for_ever)

    assert blockers_after(run, 5.0) == ["batch 0 waits for group 1: member 0 in the rollout function since 3.0 s"]
