"""Runs built so that the answer is known by hand: who waited for what, and for how many seconds."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import Scripted, ScriptedRun

from staleflow import LLM, Config, ListTasks, StragglerPolicy, uniform_rewards
from staleflow.cli import main
from staleflow.config import StragglerAction
from staleflow.coordinator import Command, LeastLoad, Snapshot
from staleflow.errors import EngineError, RunFolderError, TrainerError
from staleflow.events import Answered, Dropped, PhaseBegan, Routed
from staleflow.explain import Cause, Explanation, TrainerWait, Waiting, command, explain, moment, read_run
from staleflow.rollouts import STALL_WARNING_S
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest, Generation, Task, TrainBatch

MILLISECOND = 0.001


class TimedEngine(ScriptedEngine):
    """Answers every request with one token after a time that the test chooses by the request's id."""

    def __init__(self, seconds: Callable[[str], float] = lambda _: 1.0, **options: Any) -> None:
        super().__init__(**{"update_s": 0.0, **options})
        self._seconds = seconds

    async def generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(self._seconds(request.request_id))
        return Generation(request.request_id, [1], [-1.0], [self.version], "stop")


class SlowTasks:
    """Every task is at hand only after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._tasks = ListTasks(range(100), seed=None)
        self._seconds = seconds

    async def next(self) -> Task[int] | None:
        await asyncio.sleep(self._seconds)
        return await self._tasks.next()


def trainer(step_s: float) -> ScriptedTrainer:
    return ScriptedTrainer(step_s=step_s, publish_s=0.0)


def slow_reward(seconds: float) -> Callable[[int, LLM], Any]:
    async def rollout(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=1)
        await asyncio.sleep(seconds)
        return float(task % 2)

    return rollout


def explained(run: ScriptedRun) -> Explanation:
    """Run and explain; checks that all sums are those that the run measured itself."""
    run.run()
    found = explain(read_run(run.run_dir))
    check_sums(run, found)
    return found


def check_sums(run: ScriptedRun, found: Explanation) -> None:
    lines = (run.run_dir / "metrics.jsonl").read_bytes().splitlines()
    measured = {record["step"]: record for record in map(json.loads, lines)}
    by_batch = {wait.batch: wait for wait in found.waits}
    for step, record in measured.items():
        waited_s = by_batch[step].waited_s if step in by_batch else 0.0
        assert waited_s == pytest.approx(record["trainer_wait_s"], abs=MILLISECOND)
    parts: list[Waiting | TrainerWait] = [found.trainer, *found.engines, *found.waits]
    for waiting in parts:
        assert sum(waiting.seconds.values()) == pytest.approx(waiting.waited_s, abs=1e-9)
        assert all(seconds > 0 for seconds in waiting.seconds.values())
    assert found.trainer.waited_s == pytest.approx(sum(wait.waited_s for wait in found.waits), abs=1e-9)
    for engine, idle in enumerate(found.engines):
        assert idle.waited_s == pytest.approx(idle_s(run, engine, found), abs=MILLISECOND)
    if len(found.engines) == 1 and found.published == found.steps:
        rollout_wait_s = sum(record["rollout_wait_s"] for record in measured.values())
        assert found.engines[0].waited_s == pytest.approx(rollout_wait_s, abs=MILLISECOND)


def idle_s(run: ScriptedRun, engine: int, found: Explanation) -> float:
    """Seconds of training without a request on the engine, from the log alone."""
    events = run.events()
    begin_s = next(event.t for event in events if isinstance(event, PhaseBegan) and event.phase == "training")
    end_s = begin_s + found.training_s
    ended = {event.request: event.t for event in events if isinstance(event, Answered | Dropped)}
    busy = sorted(
        (max(event.t, begin_s), min(ended[event.request], end_s))
        for event in events
        if isinstance(event, Routed) and event.engine == engine
    )
    idle, free_from_s = 0.0, begin_s
    for start_s, stop_s in busy:
        idle += max(0.0, min(start_s, end_s) - free_from_s)
        free_from_s = max(free_from_s, stop_s)
    return idle + max(0.0, end_s - free_from_s)


def near(seconds: dict[Cause, float]) -> Any:
    return pytest.approx(seconds, abs=1e-5)


# -- one cause each ----------------------------------------------------------------------------------------------


def test_slow_engine_is_what_the_trainer_waits_for(scripted: Scripted) -> None:
    config = Config(steps=2, batch_size=1, group_size=2, max_staleness=0)
    found = explained(scripted(config, engines=[TimedEngine(lambda _: 3.0)], trainer=trainer(1.0)))
    assert found.trainer.seconds == near({Cause.GENERATION: 6.0})
    assert [wait.waited_s for wait in found.waits] == pytest.approx([3.0, 3.0])
    assert str(found.waits[1]) == "batch 1 waited 3.00 s for group 2: member 0 running on engine 0 since 4.0 s"
    assert found.training_s == pytest.approx(8.0)


def test_synchronous_training_makes_engines_wait_for_the_staleness_bound(scripted: Scripted) -> None:
    config = Config(steps=2, batch_size=1, group_size=2, max_staleness=0)
    found = explained(scripted(config, engines=[TimedEngine()], trainer=trainer(5.0)))
    assert found.engines[0].seconds == near({Cause.STALENESS_BOUND: 5.0, Cause.NOTHING_LEFT: 5.0})


def test_slow_trainer_makes_engines_wait_for_the_staleness_bound(scripted: Scripted) -> None:
    """Two groups are admitted at once, then one for every version: it takes 1 of the 5 seconds of a step."""
    config = Config(steps=4, batch_size=1, group_size=1, max_staleness=1)
    found = explained(scripted(config, engines=[TimedEngine()], trainer=trainer(5.0)))
    assert found.trainer.seconds == near({Cause.GENERATION: 1.0})
    assert found.engines[0].seconds == near({Cause.STALENESS_BOUND: 5.0 + 4.0, Cause.NOTHING_LEFT: 4.0 + 5.0})


def test_slow_weight_update_is_what_both_wait_for(scripted: Scripted) -> None:
    config = Config(steps=2, batch_size=1, group_size=2, max_staleness=0)
    found = explained(scripted(config, engines=[TimedEngine(update_s=7.0)], trainer=trainer(2.0)))
    assert found.trainer.seconds == near({Cause.SYNC: 7.0, Cause.GENERATION: 2.0})
    assert found.engines[0].seconds == near({Cause.SYNC: 7.0, Cause.STALENESS_BOUND: 2.0, Cause.NOTHING_LEFT: 2.0})
    assert str(found.waits[1]) == "batch 1 waited 8.00 s because the published weights are still being pulled"


def test_slow_reward_is_what_both_wait_for(scripted: Scripted) -> None:
    config = Config(steps=2, batch_size=1, group_size=2, max_staleness=0)
    run = scripted(config, rollout=slow_reward(4.0), engines=[TimedEngine()], trainer=trainer(2.0))
    found = explained(run)
    assert found.trainer.seconds == near({Cause.ROLLOUT_FUNCTION: 8.0, Cause.GENERATION: 2.0})
    assert found.engines[0].seconds == near(
        {Cause.ROLLOUT_FUNCTION: 8.0, Cause.STALENESS_BOUND: 2.0, Cause.NOTHING_LEFT: 2.0}
    )
    assert str(found.waits[0]) == "batch 0 waited 5.00 s for group 1: member 0 in the rollout function since 1.0 s"


def test_slow_task_source_is_what_both_wait_for(scripted: Scripted) -> None:
    config = Config(steps=1, batch_size=2, group_size=1)
    found = explained(scripted(config, tasks=SlowTasks(2.0), engines=[TimedEngine()], trainer=trainer(1.0)))
    assert found.trainer.seconds == near({Cause.NO_TASK: 4.0, Cause.GENERATION: 1.0})
    assert found.engines[0].seconds == near({Cause.NO_TASK: 2.0 + 1.0, Cause.NOTHING_LEFT: 1.0})
    assert str(found.waits[0]) == "batch 0 waited 5.00 s because no task is at hand"


def test_source_without_enough_tasks_is_why_the_last_batch_never_comes(scripted: Scripted) -> None:
    config = Config(steps=3, batch_size=2, group_size=1)
    tasks = ListTasks(range(3), seed=None, epochs=1)
    found = explained(scripted(config, tasks=tasks, engines=[TimedEngine(capacity=1)], trainer=trainer(0.0)))
    assert [(wait.batch, wait.over) for wait in found.waits] == [(0, True), (1, False)]
    assert found.waits[1].seconds == near({Cause.SOURCE_ENDED: 1.0})
    assert str(found.waits[1]) == "batch 1 has waited 1.00 s because the task source has no more"


def test_engines_without_room_admit_too_few_groups(scripted: Scripted) -> None:
    config = Config(steps=1, batch_size=2, group_size=1)
    found = explained(scripted(config, engines=[TimedEngine(capacity=1)], trainer=trainer(1.0)))
    assert found.trainer.seconds == near({Cause.NO_ROOM: 1.0, Cause.GENERATION: 1.0})


def test_room_taken_up_by_rewards_is_the_rollout_functions(scripted: Scripted) -> None:
    config = Config(steps=1, batch_size=2, group_size=1)
    run = scripted(config, rollout=slow_reward(2.0), engines=[TimedEngine(capacity=1)], trainer=trainer(1.0))
    found = explained(run)
    assert found.trainer.seconds == near({Cause.ROLLOUT_FUNCTION: 4.0, Cause.NO_ROOM: 1.0, Cause.GENERATION: 1.0})
    assert found.engines[0].seconds == near({Cause.ROLLOUT_FUNCTION: 4.0, Cause.NOTHING_LEFT: 1.0})


def test_what_most_blocking_members_do_is_the_cause_and_generation_wins_a_tie(scripted: Scripted) -> None:
    """Three members on an engine for one: two queue in the first second, one in the next."""
    config = Config(steps=1, batch_size=1, group_size=3)
    found = explained(scripted(config, engines=[TimedEngine(capacity=1)], trainer=trainer(1.0)))
    assert found.trainer.seconds == near({Cause.QUEUED: 1.0, Cause.GENERATION: 2.0})
    assert str(found.waits[0]) == "batch 0 waited 3.00 s for group 1: member 2 running on engine 0 since 2.0 s"


def test_policy_that_leaves_an_engine_idle_is_named(scripted: Scripted) -> None:
    class OnlyTheFirst:
        """Routes as usual, but to engine 0."""

        def decide(self, snapshot: Snapshot) -> list[Command]:
            only = msgspec.structs.replace(snapshot, engines=snapshot.engines[:1])
            return LeastLoad().decide(only)

    config = Config(steps=1, batch_size=1, group_size=3)
    engines = [TimedEngine(capacity=1), TimedEngine(capacity=1)]
    found = explained(scripted(config, coordinator=OnlyTheFirst(), engines=engines, trainer=trainer(1.0)))
    assert found.engines[1].seconds == near({Cause.CONTROLLER: 2.0, Cause.NOTHING_LEFT: 2.0})


def test_evaluation_keeps_engines_busy_and_counts_as_no_wait(scripted: Scripted) -> None:
    """Held-out tasks run on the engine in seconds 3 to 4, while the trainer trains the second batch."""
    config = Config(steps=2, batch_size=1, group_size=1, max_staleness=1, evaluate_every_steps=1)
    found = explained(scripted(config, held_out=[7], engines=[TimedEngine()], trainer=trainer(2.0)))
    assert found.trainer.seconds == near({Cause.GENERATION: 1.0})
    assert found.engines[0].seconds == near({Cause.NOTHING_LEFT: 2.0 + 1.0})


# -- stragglers, moments -----------------------------------------------------------------------------------------


def straggler(scripted: Scripted) -> ScriptedRun:
    """Member 3 of the first group takes 10 seconds, on engine 1; all else takes one."""
    engines = [TimedEngine(lambda request: 10.0 if request.startswith("1.3.") else 1.0) for _ in range(2)]
    config = Config(steps=2, batch_size=1, group_size=4, max_staleness=0)
    return scripted(config, engines=engines, trainer=trainer(2.0))


def test_straggler_is_named(scripted: Scripted) -> None:
    found = explained(straggler(scripted))
    assert str(found.waits[0]) == "batch 0 waited 10.00 s for group 1: member 3 running on engine 1 since 0.0 s"
    # Engine 0 idles with the trainer, for what is still on engine 1; then both for the trainer.
    assert found.engines[0].seconds == near(
        {Cause.GENERATION: 9.0, Cause.STALENESS_BOUND: 2.0, Cause.NOTHING_LEFT: 2.0}
    )
    assert found.engines[1].seconds == near({Cause.STALENESS_BOUND: 2.0, Cause.NOTHING_LEFT: 2.0})


def test_moment_spells_out_the_blockers(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    run = straggler(scripted)
    run.run()
    now = moment(read_run(run.run_dir), 5.0)
    assert now.cause is Cause.GENERATION
    assert list(map(str, now.blockers)) == ["batch 0 waits for group 1: member 3 running on engine 1 since 0.0 s"]
    assert [engine.cause for engine in now.engines] == [Cause.GENERATION, None]
    assert [engine.idle_since_s for engine in now.engines] == [1.0, None]
    assert main(["explain", str(run.run_dir), "--at", "5"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "At 5.00 s, in phase 'training':",
        "  the trainer waits for batch 0 since 0.00 s: members are still being generated",
        "    batch 0 waits for group 1: member 3 running on engine 1 since 0.0 s",
        "  engine 0 (version 0) has nothing to run since 1.00 s: members are still being generated",
        "  engine 1 (version 0) runs 1 requests",
    ]


def test_moment_while_the_trainer_works_and_engines_pull(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(steps=3, batch_size=1, group_size=1, max_staleness=1)
    run = scripted(config, engines=[TimedEngine(update_s=3.0)], trainer=trainer(2.0))
    run.run()
    assert main(["explain", str(run.run_dir), "--at", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "At 4.00 s, in phase 'training':",
        "  the trainer trains batch 1 since 3.00 s",
        "  engine 0 (version 0, and pulls version 1) has nothing to run since 1.00 s: "
        "the published weights are still being pulled",
    ]


def test_moment_tells_how_many_groups_are_missing(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(steps=1, batch_size=3, group_size=1)
    run = scripted(config, tasks=SlowTasks(2.0), engines=[TimedEngine()], trainer=trainer(1.0))
    run.run()
    assert main(["explain", str(run.run_dir), "--at", "2.5"]) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "  the trainer waits for batch 0 since 0.00 s: no task is at hand",
        "    batch 0 waits for group 1: member 0 running on engine 0 since 2.0 s",
        "    batch 0 waits for 2 more groups to be admitted",
    ]


def test_moments_agree_with_the_whole(scripted: Scripted) -> None:
    run = scripted(RANDOM, engines=[ScriptedEngine(seed=4, token_s=0.1)], trainer=trainer(0.3))
    found = explained(run)
    recording = read_run(run.run_dir)
    for wait in found.waits:
        causes = {moment(recording, wait.begin_s + wait.waited_s * part / 50).cause for part in range(50)}
        assert causes - {None} <= set(wait.seconds)


@pytest.mark.parametrize("at_s", ["-1", "1e9", "nan"])
def test_moment_that_is_not_known_is_refused(scripted: Scripted, at_s: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = straggler(scripted)
    run.run()
    assert main(["explain", str(run.run_dir), f"--at={at_s}"]) == 1
    assert "the run is known from 0 to" in capsys.readouterr().err


# -- any run at all ----------------------------------------------------------------------------------------------

RANDOM = Config(steps=8, batch_size=3, group_size=3, max_staleness=2, max_attempts=2, evaluate_every_steps=3)


async def turbulent(task: int, llm: LLM) -> float:
    """Several turns, an environment that takes its time, and failures."""
    rng = random.Random(task)
    for _ in range(rng.randint(1, 3)):
        completion = await llm.generate([task % 10], max_new_tokens=6)
        await asyncio.sleep(rng.expovariate(5.0))
    if rng.random() < 0.2:
        raise RuntimeError("the environment broke")
    return float(sum(completion.token_ids) % 2)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("step_s", [0.01, 1.0], ids=["fast trainer", "slow trainer"])
@pytest.mark.parametrize("capacities", [(64,), (2, 5), (4, 4, 4)], ids=str)
def test_seconds_per_cause_add_up_to_the_waits_that_the_run_measured(
    scripted: Scripted, capacities: Sequence[int], step_s: float, max_staleness: int
) -> None:
    engines = [
        ScriptedEngine(seed=n, token_s=0.02 * (n + 1), update_s=0.1, capacity=capacity)
        for n, capacity in enumerate(capacities)
    ]
    config = msgspec.structs.replace(RANDOM, max_staleness=max_staleness, max_failure_share=1.0, rollout_timeout_s=1.0)
    run = scripted(
        config,
        engines=engines,
        rollout=turbulent,
        held_out=[1, 3],
        group_filter=uniform_rewards,
        trainer=trainer(step_s),
    )
    explained(run)


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("action", ["replace", "truncate", "close_short"])
def test_seconds_add_up_with_redundancy_and_straggler_policies(
    scripted: Scripted, action: StragglerAction, extra: int
) -> None:
    config = msgspec.structs.replace(
        RANDOM,
        extra_groups=extra,
        extra_members=extra,
        stragglers=StragglerPolicy(action=action, patience_s=0.2, max_blockers=2),
        max_failure_share=1.0,
    )
    engines = [ScriptedEngine(seed=n, token_s=0.02 * (n + 1), update_s=0.1, capacity=16) for n in range(2)]
    explained(scripted(config, engines=engines, rollout=turbulent, trainer=trainer(0.1)))


def test_members_beyond_the_group_size_are_not_waited_for(scripted: Scripted) -> None:
    """Member 2 would take 10 seconds; the group is complete with the first two of three."""
    engine = TimedEngine(lambda request: 10.0 if request.startswith("1.2.") else 1.0)
    config = Config(steps=1, batch_size=1, group_size=2, extra_members=1)
    found = explained(scripted(config, engines=[engine], trainer=trainer(2.0)))
    assert found.trainer.seconds == near({Cause.GENERATION: 1.0})
    assert found.engines[0].seconds == near({Cause.NOTHING_LEFT: 2.0})


# -- runs that did not end well ----------------------------------------------------------------------------------


def test_run_that_failed_is_explained_to_its_end(scripted: Scripted) -> None:
    class Fails(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> Any:
            if batch.step == 2:
                raise TrainerError("out of memory")
            return await super().step(batch)

    config = Config(steps=5, batch_size=1, group_size=2, max_staleness=0)
    run = scripted(config, engines=[TimedEngine()], trainer=Fails(step_s=1.0, publish_s=0.0))
    run.fail(TrainerError)
    found = explain(read_run(run.run_dir))
    check_sums(run, found)
    assert (found.published, found.until_s) == (2, 5.0)
    assert found.trainer.seconds == near({Cause.GENERATION: 3.0})
    assert all(wait.over for wait in found.waits)


def test_run_that_never_came_to_training_has_no_waits(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    class DoesNotStart(ScriptedEngine):
        async def start(self, name: str, log_folder: Path) -> None:
            await asyncio.sleep(3.0)
            raise EngineError("no such model")

    run = scripted(RANDOM, engines=[DoesNotStart()])
    run.fail(EngineError)
    found = explain(read_run(run.run_dir))
    assert (found.phase, found.training_s, found.waits) == ("starting", 0.0, ())
    assert main(["explain", str(run.run_dir)]) == 0
    assert "Waiting counts while the run trains; so far it has not." in capsys.readouterr().out
    assert main(["explain", str(run.run_dir), "--at", "0"]) == 0
    assert "the trainer is not asked to train" in capsys.readouterr().out


def test_run_that_was_killed_is_explained_as_far_as_both_files_go(scripted: Scripted) -> None:
    """Both files end anywhere, each for itself."""
    config = msgspec.structs.replace(RANDOM, steps=20)
    run = scripted(config, engines=[ScriptedEngine(seed=4, token_s=0.1)], trainer=trainer(0.3))
    whole = explained(run)
    events, journal = run.run_dir / "events.jsonl", run.run_dir / "ledger.journal"
    whole_events, whole_journal = events.read_bytes(), journal.read_bytes()
    rng = random.Random(5)
    begun = 0
    for _ in range(200):
        events.write_bytes(whole_events[: rng.randrange(len(whole_events))])
        journal.write_bytes(whole_journal[: rng.choice([0, rng.randrange(60, len(whole_journal))])])
        found = explain(read_run(run.run_dir))
        assert found.until_s <= whole.until_s
        assert sum(found.trainer.seconds.values()) == pytest.approx(found.trainer.waited_s)
        for known, wait in zip(found.waits, whole.waits, strict=False):
            assert known == wait or (known.begin_s == wait.begin_s and known.waited_s <= wait.waited_s)
        begun += found.training_s > 0
    assert begun > 50


def test_stalled_run_brings_its_folder_up_to_date_when_it_says_so(scripted: Scripted) -> None:
    seen: list[Explanation] = []

    async def stalls(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=1)
        await asyncio.sleep(STALL_WARNING_S + 1)
        seen.append(explain(read_run(run.run_dir)))
        return 1.0

    config = Config(steps=1, batch_size=1, group_size=1, rollout_timeout_s=500)
    run = scripted(config, rollout=stalls, engines=[TimedEngine()])
    run.run()
    [wait] = seen[0].waits
    assert wait.seconds == near({Cause.GENERATION: 1.0, Cause.ROLLOUT_FUNCTION: STALL_WARNING_S - 1.0})
    assert str(wait) == (
        f"batch 0 has waited {STALL_WARNING_S:.2f} s for group 1: member 0 in the rollout function since 1.0 s"
    )


# -- folders that hold no run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "events.jsonl", "ledger.journal"])
def test_missing_file_is_named(scripted: Scripted, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = scripted(Config(steps=1, batch_size=1, group_size=1))
    run.run()
    (run.run_dir / name).unlink()
    assert main(["explain", str(run.run_dir)]) == 1
    message = capsys.readouterr().err
    assert f"{run.run_dir / name} does not exist: give the folder of a run" in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{}", r"config\.json is damaged: .*`config`; restore it from a copy"),
        ("config.json", b"\xff", r"config\.json is damaged: .*; restore it from a copy"),
        (
            "events.jsonl",
            b'{"event":"phase_began","t":0.0,"phase":"starting"}\n?\n',
            r"events\.jsonl, line 2 is no event",
        ),
        ("events.jsonl", b'{"event":"routed","t":0.0,"request":"1.0.0.0","engine":0}\n', "contradicts itself at 0.0"),
        ("ledger.journal", b"something else altogether", r"ledger\.journal is damaged: .*; restore it from a copy"),
    ],
)
def test_damaged_file_is_named(scripted: Scripted, name: str, content: bytes, message: str) -> None:
    run = scripted(Config(steps=1, batch_size=1, group_size=1))
    run.run()
    (run.run_dir / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=message):
        explain(read_run(run.run_dir))


def test_flipped_byte_in_the_journal_is_noticed(scripted: Scripted) -> None:
    run = scripted(Config(steps=2, batch_size=1, group_size=1))
    run.run()
    journal = run.run_dir / "ledger.journal"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"ledger\.journal is damaged: .*; restore it from a copy"):
        read_run(run.run_dir)


def test_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"file/config\.json cannot be read: Not a directory"):
        read_run(tmp_path / "file")


# -- the command -------------------------------------------------------------------------------------------------


def test_command_prints_a_table_and_the_longest_waits(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(steps=2, batch_size=1, group_size=2, max_staleness=0)
    run = scripted(config, rollout=slow_reward(4.0), engines=[TimedEngine()], trainer=trainer(2.0))
    run.run()
    assert main(["explain", str(run.run_dir)]) == 0
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Known until 14.00 s, in phase 'done': 2 of 2 steps, 14.00 s of training."
    assert "trainer rollout functions are at work 8.00 57.1%" in lines
    assert "all 10.00 71.4%" in lines
    assert "engine 0 rollout functions are at work 8.00 57.1%" in lines
    assert lines[-3:] == [
        "The longest of 2 waits of the trainer:",
        "batch 0 waited 5.00 s for group 1: member 0 in the rollout function since 1.0 s "
        "(4.00 s rollout functions are at work, 1.00 s members are still being generated)",
        "batch 1 waited 5.00 s for group 2: member 0 in the rollout function since 8.0 s "
        "(4.00 s rollout functions are at work, 1.00 s members are still being generated)",
    ]


def test_command_prints_json(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    run = straggler(scripted)
    run.run()
    assert main(["explain", str(run.run_dir), "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Explanation)
    assert found == explain(read_run(run.run_dir))
    assert main(["explain", str(run.run_dir), "--at", "5", "--json"]) == 0
    now = json.loads(capsys.readouterr().out)
    assert (now["cause"], now["trainer"]["state"], now["blockers"][0]["member"]) == ("generation", "waits_for_batch", 3)


def test_progress_shows_when_it_takes_long(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scripted(Config(steps=1, batch_size=1, group_size=1))
    run.run()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["explain", str(run.run_dir)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 0.0)
    assert main(["explain", str(run.run_dir)]) == 0
    assert "reading events" in capsys.readouterr().err


def test_python_m_is_the_command(scripted: Scripted) -> None:
    run = scripted(Config(steps=1, batch_size=1, group_size=1))
    run.run()
    command = [sys.executable, "-m", "staleflow", "explain", str(run.run_dir)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "1 of 1 steps" in printed
