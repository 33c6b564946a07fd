"""Runs built so that the answer is known by hand: who waited for what, and for how many seconds."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from explained import RANDOM, SlowTasks, TimedEngine, explained, near, slow_reward, straggler, trainer, turbulent
from support import Scripted

from staleflow import LLM, Config, ListTasks, StragglerPolicy, uniform_rewards
from staleflow.cli import main
from staleflow.config import StragglerAction
from staleflow.coordinator import Command, LeastLoad, Snapshot
from staleflow.errors import EngineError
from staleflow.explain import Cause, moment, read_run
from staleflow.testing import ScriptedEngine

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


def test_evaluation_that_holds_the_only_engine_is_what_both_wait_for(scripted: Scripted) -> None:
    """The held-out task's reward takes 10 seconds, from second 4 on; version 2 is there from second 6 on."""

    async def rollout(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=1)
        await asyncio.sleep(10.0 if task < 0 else 0.0)
        return float(task % 2)

    config = Config(steps=3, batch_size=1, group_size=1, max_staleness=0, evaluate_every_steps=1)
    run = scripted(config, rollout=rollout, held_out=[-1], engines=[TimedEngine()], trainer=trainer(2.0))
    found = explained(run)
    assert found.trainer.seconds == near({Cause.GENERATION: 3.0, Cause.EVALUATION: 8.0})
    assert found.engines[0].seconds == near(
        {Cause.STALENESS_BOUND: 4.0, Cause.EVALUATION: 8.0, Cause.NOTHING_LEFT: 2.0}
    )
    assert str(found.waits[2]) == "batch 2 waited 9.00 s because an evaluation holds the engine at its version"


# -- stragglers, moments -----------------------------------------------------------------------------------------


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
        "  engine 1 (version 0) runs 1 request",
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


def test_moment_prints_the_first_blockers_and_counts_the_others(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    run = scripted(Config(steps=1, batch_size=12, group_size=1), engines=[TimedEngine()])
    run.run()
    assert main(["explain", str(run.run_dir), "--at", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("waits for group" in line for line in lines) == 10
    assert "    and for 2 more running groups" in lines


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


def test_request_of_an_attempt_that_was_given_up_says_nothing_of_the_next(scripted: Scripted) -> None:
    """The first attempt times out at 20 s and leaves a request behind until 25 s; the second is answered at 30 s."""

    async def leaves_its_request(task: int, llm: LLM) -> float:
        await asyncio.shield(asyncio.ensure_future(llm.generate([1], max_new_tokens=1)))
        return 1.0

    config = Config(steps=1, batch_size=1, group_size=1, rollout_timeout_s=20.0, max_failure_share=1.0)
    engine = TimedEngine(lambda request: 25.0 if request.startswith("1.0.0.") else 10.0)
    found = explained(scripted(config, rollout=leaves_its_request, engines=[engine], trainer=trainer(1.0)))
    assert found.trainer.seconds == near({Cause.GENERATION: 30.0})


def test_members_that_failed_for_good_are_not_waited_for(scripted: Scripted) -> None:
    """Members 0 and 1 fail at 1 s and are not played again; member 2 is generated for 10 s."""
    generated = 0

    async def first_two_fail(task: int, llm: LLM) -> float:
        nonlocal generated
        await llm.generate([1], max_new_tokens=1)
        generated += 1
        if generated <= 2:
            raise RuntimeError("the environment broke")
        return 1.0

    config = Config(
        steps=1, batch_size=1, group_size=1, extra_members=2, max_attempts=1, max_failure_share=1.0, max_staleness=0
    )
    engine = TimedEngine(lambda request: 10.0 if request.startswith("1.2.") else 1.0)
    found = explained(scripted(config, rollout=first_two_fail, engines=[engine], trainer=trainer(1.0)))
    assert found.trainer.seconds == near({Cause.GENERATION: 10.0})


def test_members_beyond_the_group_size_are_not_waited_for(scripted: Scripted) -> None:
    """Member 2 would take 10 seconds; the group is complete with the first two of three."""
    engine = TimedEngine(lambda request: 10.0 if request.startswith("1.2.") else 1.0)
    config = Config(steps=1, batch_size=1, group_size=2, extra_members=1)
    found = explained(scripted(config, engines=[engine], trainer=trainer(2.0)))
    assert found.trainer.seconds == near({Cause.GENERATION: 1.0})
    assert found.engines[0].seconds == near({Cause.NOTHING_LEFT: 2.0})


def test_time_without_an_engine_is_the_dead_engines(scripted: Scripted) -> None:
    class DiesOnce(TimedEngine):
        lives = 0

        async def start(self, name: str, log_folder: Path) -> None:
            await asyncio.sleep(9.0 if self.lives else 0.0)
            await super().start(name, log_folder)

        async def run(self) -> None:
            self.lives += 1
            await asyncio.sleep(2.5 if self.lives == 1 else 1000.0)
            raise EngineError("died")

    config = Config(steps=3, batch_size=1, group_size=1, max_staleness=0)
    found = explained(scripted(config, engines=[DiesOnce()], trainer=trainer(1.0)))
    # It dies in the middle of the second batch, pauses for one second and loads for nine.
    assert found.engines[0].seconds[Cause.ENGINE_DOWN] == pytest.approx(10.0, abs=1e-3)
    assert found.trainer.seconds[Cause.ENGINE_DOWN] == pytest.approx(10.0, abs=1e-3)


def test_engine_that_takes_nothing_because_it_syncs_waits_for_the_sync(scripted: Scripted) -> None:
    engines = [TimedEngine(update_s=0.5)]
    config = Config(steps=4, batch_size=1, group_size=1, max_staleness=1)
    coordinator = LeastLoad(sync_mode="abort")
    found = explained(scripted(config, engines=engines, trainer=trainer(0.5), coordinator=coordinator))
    assert found.engines[0].seconds[Cause.SYNC] >= 1.0
