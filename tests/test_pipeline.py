"""A whole run on scripted parts: what must be true of every event log."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from support import Scripted, routed_group

from staleflow import LLM, Config, ListTasks, Pipeline, Trajectory, uniform_rewards
from staleflow.errors import ConfigError
from staleflow.events import Admitted, Completed, Consumed, Evaluated, Filtered, Finished, Published, Routed, Synced
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest

FLEETS = {
    "one engine": lambda: [ScriptedEngine()],
    "a slow one": lambda: [ScriptedEngine(seed=1), ScriptedEngine(seed=2, token_s=0.1, update_s=1.0)],
    "three speeds": lambda: [
        ScriptedEngine(seed=n, token_s=0.01 * 3**n, update_s=0.2 * n, capacity=8) for n in range(3)
    ],
}


@pytest.mark.parametrize("seed", [0, 1])
def test_same_seed_writes_the_same_log(scripted: Scripted, seed: int) -> None:
    def log(seed: int) -> bytes:
        engines = [ScriptedEngine(seed=seed, token_s=0.02), ScriptedEngine(seed=seed + 100)]
        run = scripted(Config(steps=5, batch_size=4, group_size=2), engines=engines, held_out=[1, 2])
        run.run()
        return (run.run_dir / "events.jsonl").read_bytes()

    assert log(seed) == log(seed)
    assert log(seed) != log(seed + 1)


@pytest.mark.parametrize("step_s", [0.01, 1.0], ids=["fast trainer", "slow trainer"])
@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
def test_laws_hold_at_every_event(scripted: Scripted, max_staleness: int, fleet: str, step_s: float) -> None:
    """Accounting, capacity, staleness, whole groups: ``support.Replay`` checks them after each event."""
    config = Config(steps=8, batch_size=4, group_size=3, max_staleness=max_staleness)
    run = scripted(config, engines=FLEETS[fleet](), trainer=ScriptedTrainer(step_s=step_s))
    report = run.run()
    assert report.ended == "all_steps_done"
    assert report.steps == 8
    assert sum(report.staleness_histogram.values()) == report.trained_tokens


def test_asynchronous_training_really_is_stale(scripted: Scripted) -> None:
    """Else the bound would hold for want of anything to bound."""
    run = scripted(Config(steps=10, batch_size=4, group_size=2, max_staleness=5), trainer=ScriptedTrainer(step_s=1.0))
    report = run.run()
    assert report.staleness_max == 5
    assert report.stale_trajectories > 0


def test_every_trained_group_is_in_one_published_batch_and_reached_the_trainer_whole(scripted: Scripted) -> None:
    run = scripted(Config(steps=6, batch_size=5, group_size=4, max_staleness=3))
    run.run()
    consumed = run.events_of(Consumed)
    assert [event.batch for event in consumed] == list(range(6))
    assert [event.version for event in run.events_of(Published)] == list(range(1, 7))
    groups = list(itertools.chain.from_iterable(event.groups for event in consumed))
    assert len(groups) == len(set(groups)) == 30
    handed_over = [[member.group for member in group] for batch in run.trainer.batches for group in batch.groups]
    assert handed_over == [[group] * 4 for group in groups]
    assert all(
        [member.member for member in group] == [0, 1, 2, 3] for batch in run.trainer.batches for group in batch.groups
    )


def test_no_finished_work_is_discarded(scripted: Scripted) -> None:
    """A complete group is trained, unless the run is over before its turn."""
    run = scripted(Config(steps=10, batch_size=3, group_size=2, max_staleness=4), engines=FLEETS["three speeds"]())
    report = run.run()
    assert set(report.accounting.aborted) <= {"all_steps_done"}
    completed = {event.group for event in run.events_of(Completed)}
    assert completed == set(run.replay().trained)


def test_groups_beyond_the_last_batch_are_not_admitted(scripted: Scripted) -> None:
    run = scripted(Config(steps=3, batch_size=4, group_size=2, max_staleness=5))
    assert run.run().accounting.admitted == 12


# -- multi-turn --------------------------------------------------------------------------------------------------


def test_multi_turn_trajectory_remembers_its_context(scripted: Scripted) -> None:
    async def three_turns(task: int, llm: LLM) -> float:
        await llm.generate([1000], max_new_tokens=4)
        await llm.generate([1001, 1002], max_new_tokens=4)
        await llm.generate([], max_new_tokens=4)
        return 1.0

    engines = [ScriptedEngine(seed=1, token_s=0.05), ScriptedEngine(seed=2, token_s=0.05)]
    trainer = ScriptedTrainer(step_s=0.05)
    run = scripted(Config(steps=6, batch_size=4, group_size=2), rollout=three_turns, engines=engines, trainer=trainer)
    run.run()
    requests = {request.request_id: request for engine in engines for request in engine.requests}
    trajectories = [trajectory for batch in trainer.batches for trajectory in batch.trajectories]
    for trajectory in trajectories:
        injected = [segment.token_ids for segment in trajectory.segments if not segment.sampled]
        assert injected == [[1000], [1001, 1002]]
        assert [segment.sampled for segment in trajectory.segments] == [False, True, False, True, True]
        positions = [position for position, segment in enumerate(trajectory.segments) if segment.sampled]
        assert trajectory.requests == len(positions)
        for turn, position in enumerate(positions):
            segment = trajectory.segments[position]
            seen = requests[f"{trajectory.group}.{trajectory.member}.{trajectory.attempt}.{turn}"].token_ids
            before = trajectory.segments[:position]
            assert seen == [token for earlier in before for token in earlier.token_ids]
            assert len(segment.token_ids) == len(segment.logprobs) == len(segment.versions)
    engines_used = [{segment.engine for segment in t.segments if segment.sampled} for t in trajectories]
    assert any(len(used) > 1 for used in engines_used), "no trajectory moved between engines"
    assert any(len(set(t.versions)) > 1 for t in trajectories), "no trajectory spans two versions"


def test_completion_is_what_the_policy_said_in_this_call(scripted: Scripted) -> None:
    said: list[list[int]] = []

    async def two_turns(task: int, llm: LLM) -> float:
        for prompt in ([7], [8, 9]):
            completion = await llm.generate(prompt, max_new_tokens=5)
            assert len(completion.token_ids) == len(completion.logprobs) <= 5
            said.append(completion.token_ids)
        return 0.0

    run = scripted(Config(steps=1, batch_size=1, group_size=1), rollout=two_turns)
    run.run()
    [trajectory] = run.trainer.batches[0].trajectories
    assert trajectory.token_ids == [7, *said[0], 8, 9, *said[1]]


# -- held-out tasks ----------------------------------------------------------------------------------------------


def test_held_out_tasks_are_measured_before_during_and_after(scripted: Scripted) -> None:
    async def newest_version(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=1)
        return float(engine.version)

    engine = ScriptedEngine(update_s=0.5)
    config = Config(steps=7, batch_size=2, group_size=2, evaluate_every_steps=3)
    run = scripted(config, rollout=newest_version, engines=[engine], held_out=[1, 2, 3])
    report = run.run()
    evaluations = run.events_of(Evaluated)
    assert [event.step for event in evaluations] == [0, 3, 6, 7]
    assert all(event.tasks == 3 and event.failed == 0 for event in evaluations)
    assert all(event.versions[0] >= event.step for event in evaluations), "answered by weights older than announced"
    assert (report.accuracy_before, report.accuracy_after) == (0.0, 7.0)


def test_held_out_tasks_are_not_trained_on(scripted: Scripted) -> None:
    run = scripted(Config(steps=2, batch_size=2, group_size=2), held_out=[5000])
    run.run()
    assert all(trajectory.group > 0 for batch in run.trainer.batches for trajectory in batch.trajectories)


def test_failed_held_out_rollout_earns_nothing_and_ends_nothing(scripted: Scripted) -> None:
    async def rollout(task: int, llm: LLM) -> float:
        if task == -1:
            raise RuntimeError("no environment for this one")
        if task != -2:
            await llm.generate([1], max_new_tokens=1)
        return 1.0

    run = scripted(Config(steps=1, batch_size=1, group_size=1), rollout=rollout, held_out=[-1, -2, 3, 4])
    assert run.run().accuracy_after == 0.5
    assert [event.failed for event in run.events_of(Evaluated)] == [2, 2]


def test_evaluation_still_under_way_at_the_last_step_neither_hangs_nor_is_lost(scripted: Scripted) -> None:
    async def slow_when_held_out(task: int, llm: LLM) -> float:
        for _ in range(30 if task < 0 else 1):
            await llm.generate([1], max_new_tokens=2)
        return 1.0

    config = Config(steps=3, batch_size=1, group_size=1, evaluate_every_steps=1, rollout_timeout_s=500)
    trainer = ScriptedTrainer(step_s=0.01)
    run = scripted(config, rollout=slow_when_held_out, held_out=[-1, -2], trainer=trainer)
    report = run.run()
    # One at a time: while the first is under way, the second is not begun.
    assert [event.step for event in run.events_of(Evaluated)] == [0, 1, 3]
    assert all(event.failed == 0 for event in run.events_of(Evaluated))
    assert run.events()[-1].t < 10
    assert report.accuracy_after == 1.0


def test_a_version_is_evaluated_once(scripted: Scripted) -> None:
    """The source ends right after a publish that is due an evaluation: that was the last one already."""
    config = Config(steps=9, batch_size=2, group_size=1, evaluate_every_steps=2, rollout_timeout_s=100)
    run = scripted(
        config, tasks=ListTasks([1, 2, 3, 4], epochs=1), held_out=[1, 2, 3], engines=[ScriptedEngine(capacity=2)]
    )
    report = run.run()
    assert report.ended == "source_exhausted"
    assert [(event.step, event.failed) for event in run.events_of(Evaluated)] == [(0, 0), (2, 0)]
    assert report.wall_s < 10


# -- the end of the tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize(("tasks", "steps", "left_over"), [(10, 3, 1), (9, 3, 0), (2, 0, 2)])
def test_exhausted_source_ends_the_run(
    scripted: Scripted, tasks: int, steps: int, left_over: int, max_staleness: int
) -> None:
    config = Config(steps=50, batch_size=3, group_size=2, max_staleness=max_staleness)
    run = scripted(config, tasks=ListTasks(range(tasks), epochs=1), held_out=[1])
    report = run.run()
    assert (report.ended, report.steps, report.accounting.admitted) == ("source_exhausted", steps, tasks)
    assert report.accounting.aborted == ({"source_exhausted": left_over} if left_over else {})
    assert run.trainer.saved == [run.run_dir / "checkpoint"]


def test_slow_source_does_not_hold_up_what_already_runs(scripted: Scripted) -> None:
    class Drip(ListTasks[int]):
        async def next(self) -> Any:
            await asyncio.sleep(20.0)
            return await super().next()

    async def ten_turns(task: int, llm: LLM) -> float:
        for _ in range(10):
            await llm.generate([1], max_new_tokens=1)
        return 1.0

    config = Config(steps=3, batch_size=1, group_size=1, rollout_timeout_s=5)
    report = scripted(config, tasks=Drip(range(10)), rollout=ten_turns).run()
    assert report.accounting.failed_attempts == {}
    assert report.steps == 3


# -- filter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_filtered_groups_are_replaced(scripted: Scripted, max_staleness: int) -> None:
    async def two_rewards(task: int, llm: LLM) -> float:
        completion = await llm.generate([1], max_new_tokens=3)
        return float(completion.token_ids[0] > 4)

    config = Config(steps=8, batch_size=4, group_size=2, max_staleness=max_staleness)
    run = scripted(config, rollout=two_rewards, group_filter=uniform_rewards)
    report = run.run()
    assert report.steps == 8
    assert report.accounting.filtered["uniform_rewards"] == len(run.events_of(Filtered)) > 8
    for batch in run.trainer.batches:
        assert len(batch.groups) == 4
        assert all(len({member.reward for member in group}) == 2 for group in batch.groups)


def test_filter_that_keeps_nothing_ends_with_the_source(scripted: Scripted) -> None:
    def nothing(group: Sequence[Trajectory]) -> str:
        return "nothing is good enough"

    run = scripted(
        Config(steps=3, batch_size=2, group_size=2), tasks=ListTasks(range(40), epochs=1), group_filter=nothing
    )
    report = run.run()
    assert (report.ended, report.steps) == ("source_exhausted", 0)
    assert report.accounting.filtered == {"nothing is good enough": 40}
    assert run.trainer.batches == []


def test_filter_that_raises_ends_the_run(scripted: Scripted) -> None:
    def broken(group: Sequence[Trajectory]) -> str | None:
        raise ZeroDivisionError("advantage of nothing")

    run = scripted(Config(steps=3, batch_size=2, group_size=2), group_filter=broken)
    assert str(run.fail(ZeroDivisionError)) == "advantage of nothing"


# -- engines that differ -----------------------------------------------------------------------------------------


def test_every_engine_gets_every_fleet_wide_version_in_order(scripted: Scripted) -> None:
    run = scripted(Config(steps=10, batch_size=4, group_size=2), engines=FLEETS["three speeds"]())
    run.run()
    for index in range(3):
        versions = [event.version for event in run.events_of(Synced) if event.engine == index]
        assert versions == sorted(set(versions))


def test_request_waits_for_an_engine_new_enough(scripted: Scripted) -> None:
    """A later turn never runs on an engine older than its group."""
    engines = [ScriptedEngine(seed=1, update_s=0.01), ScriptedEngine(seed=2, update_s=5.0)]

    async def two_turns(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=3)
        await llm.generate([2], max_new_tokens=3)
        return 0.0

    config = Config(steps=12, batch_size=2, group_size=2, max_staleness=1)
    run = scripted(config, rollout=two_turns, engines=engines, trainer=ScriptedTrainer(step_s=0.05))
    report = run.run()
    assert report.accounting.failed_attempts == {}
    confirmed, admitted_at = {0: 0, 1: 0}, {}
    for event in run.events():
        match event:
            case Synced(engine=engine, version=version):
                confirmed[engine] = version
            case Admitted(group=group, version=version):
                admitted_at[group] = version
            case Routed(engine=engine):
                assert confirmed[engine] >= admitted_at[routed_group(event)]


def test_group_larger_than_all_engines_still_runs(scripted: Scripted) -> None:
    run = scripted(Config(steps=2, batch_size=2, group_size=8), engines=[ScriptedEngine(capacity=3)])
    assert run.run().steps == 2


def test_no_engine_runs_more_than_its_capacity(scripted: Scripted) -> None:
    class Counting(ScriptedEngine):
        running = most = 0

        async def generate(self, request: GenerateRequest) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                return await super().generate(request)
            finally:
                self.running -= 1

    engines = [Counting(seed=1, capacity=3), Counting(seed=2, capacity=5)]
    scripted(Config(steps=4, batch_size=8, group_size=2, max_staleness=3), engines=engines).run()
    assert [engine.most for engine in engines] == [3, 5]


# -- what cannot be built ----------------------------------------------------------------------------------------


def test_pipeline_without_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="engines is empty"):
        Pipeline(
            tasks=ListTasks([1]),
            rollout=cast(Any, None),
            engines=[],
            trainer=ScriptedTrainer(),
            config=Config(steps=1),
        )


@pytest.mark.parametrize("seed", range(12))
def test_laws_hold_in_a_random_world(scripted: Scripted, seed: int) -> None:
    """Failures, filters, several turns, engines and trainers of any speed, all at once."""
    rng = random.Random(seed)

    async def rollout(task: int, llm: LLM) -> float:
        for _ in range(rng.randint(1, 3)):
            await llm.generate([task], max_new_tokens=rng.randint(1, 6))
        if rng.random() < 0.1:
            raise ValueError("bad luck")
        return float(rng.random() < 0.5)

    config = Config(
        steps=6,
        batch_size=rng.randint(1, 4),
        group_size=rng.randint(1, 4),
        max_staleness=rng.randint(0, 4),
        max_attempts=rng.randint(1, 3),
    )
    engines = [
        ScriptedEngine(seed=n, token_s=token_s, update_s=rng.choice([0.01, 3.0]), capacity=rng.randint(1, 9))
        for n, token_s in enumerate(rng.sample([0.001, 0.01, 0.1], rng.randint(1, 3)))
    ]
    run = scripted(
        config,
        rollout=rollout,
        engines=engines,
        trainer=ScriptedTrainer(step_s=rng.choice([0.01, 1.0])),
        group_filter=uniform_rewards if config.group_size > 1 else None,
    )
    assert run.run().steps == 6
    assert all(event.reward in (0.0, 1.0) for event in run.events_of(Finished))


# -- the run folder ----------------------------------------------------------------------------------------------


def test_config_says_what_every_part_was_made_with(scripted: Scripted) -> None:
    config = Config(steps=1, batch_size=1, group_size=1)
    run = scripted(
        config, engines=[ScriptedEngine(seed=1), ScriptedEngine(seed=2)], trainer=ScriptedTrainer(step_s=3.0)
    )
    run.run()
    written = msgspec.json.decode((run.run_dir / "config.json").read_bytes())
    assert msgspec.convert(written["config"], Config) == config
    assert [engine["seed"] for engine in written["engines"]] == [1, 2]
    assert written["trainer"]["step_s"] == 3.0
