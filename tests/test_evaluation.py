"""Held-out tasks: they wait for room without running out of time, and leave training its own."""

import asyncio
import itertools
import json
import random

import pytest
from support import Scripted, ScriptedRun, one_turn, virtually

from staleflow import LLM, Config
from staleflow.coordinator import Command, LeastLoad, Snapshot, Sync
from staleflow.errors import EngineGoneError, TooManyFailuresError
from staleflow.events import Consumed, Evaluated, EvaluationBegan, Published, Synced
from staleflow.statistics import EvaluationProgress
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest, Generation, SyncMode

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


# -- pinned to one version -------------------------------------------------------------------------------------------


async def turns(task: int, llm: LLM) -> float:
    """Two turns with work between; those of held-out tasks, below 0, take longer than several steps."""
    await llm.generate([1], max_new_tokens=8)
    await asyncio.sleep(3.0 if task < 0 else 0.1)
    return await one_turn(task, llm)


def check_pinned(run: ScriptedRun) -> list[Evaluated]:
    """Every token of every evaluation is of its version, and no engine it holds confirms another one meanwhile."""
    events = run.events()
    held: tuple[int, ...] = ()
    for event in events:
        match event:
            case EvaluationBegan(version=version, engines=engines):
                assert held == ()
                held, pinned = engines, version
            case Evaluated(step=step, versions=versions):
                assert (step, versions) == (pinned, (pinned, pinned))
                held = ()
            case Synced(engine=engine, version=version):
                assert engine not in held or version <= pinned
    return run.events_of(Evaluated)


@pytest.mark.parametrize("seed", range(12))
def test_every_token_is_of_the_version_evaluated(scripted: Scripted, seed: int) -> None:
    rng = random.Random(seed)
    config = Config(
        steps=12,
        batch_size=rng.randint(1, 3),
        group_size=2,
        max_staleness=rng.choice([0, 1, 4]),
        evaluate_every_steps=rng.randint(1, 4),
    )
    engines = [
        ScriptedEngine(seed=number, token_s=rng.choice([0.01, 0.1]), update_s=rng.choice([0.0, 0.05, 2.0]), capacity=4)
        for number in range(rng.randint(1, 3))
    ]
    trainer = ScriptedTrainer(step_s=rng.choice([0.0, 0.2]), publish_s=rng.choice([0.0, 0.02]))
    run = scripted(config, rollout=turns, held_out=range(-5, 0), engines=engines, trainer=trainer)
    report = run.run()
    evaluations = check_pinned(run)
    assert [evaluations[0].step, evaluations[-1].step] == [0, config.steps]
    assert len(evaluations) > 2
    assert report.held_out_failures == 0


def test_other_engines_and_the_trainer_go_on(scripted: Scripted) -> None:
    """An evaluation that lasts for more steps than one engine alone would be allowed to lag behind."""
    config = Config(steps=40, batch_size=2, group_size=2, max_staleness=1, evaluate_every_steps=10)
    run = scripted(config, rollout=turns, held_out=range(-8, 0), engines=[ScriptedEngine(capacity=8) for _ in range(3)])
    run.run()
    _, second, *_ = check_pinned(run)
    events = run.events()
    [began] = [event for event in events if isinstance(event, EvaluationBegan) and event.version == second.step]
    assert len(began.engines) == 1
    meanwhile = events[events.index(began) : events.index(second)]
    assert len([event for event in meanwhile if isinstance(event, Published)]) > 2 * (config.max_staleness + 1)
    assert {event.engine for event in meanwhile if isinstance(event, Synced)} > set(range(3)) - set(began.engines)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_one_engine_alone_trains_up_to_the_bound_and_then_waits(scripted: Scripted, max_staleness: int) -> None:
    config = Config(steps=20, batch_size=2, group_size=2, max_staleness=max_staleness, evaluate_every_steps=10)
    run = scripted(config, rollout=turns, held_out=range(-64, 0), engines=[ScriptedEngine(capacity=8)])
    report = run.run()
    _, second, _ = check_pinned(run)
    assert second.step == 10
    trained = [event.version for event in run.events_of(Published) if event.t < second.t]
    assert max(trained) == 10 + max_staleness + 1
    assert report.staleness_max <= max_staleness


def test_policy_that_knows_nothing_of_evaluations_cannot_move_a_held_engine(scripted: Scripted) -> None:
    class Impatient(LeastLoad):
        def decide(self, snapshot: Snapshot) -> list[Command]:
            syncs: list[Command] = [Sync(engine.engine, snapshot.published) for engine in snapshot.engines]
            behind = any(engine.version < snapshot.published for engine in snapshot.engines)
            return super().decide(snapshot) + (syncs if behind and snapshot.engines[0].held_at is not None else [])

    config = Config(steps=12, batch_size=1, group_size=2, max_staleness=4, evaluate_every_steps=3)
    run = scripted(config, rollout=turns, held_out=range(-5, 0), coordinator=Impatient())
    run.run()
    assert len(check_pinned(run)) > 2


def test_reply_of_another_version_does_not_count(scripted: Scripted) -> None:
    """An engine that swaps weights unasked is found out by what it reports."""

    class Swaps(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            generation = await super().generate(request)
            if request.request_id.startswith("0.") and next(replies) == 12:
                generation.versions[-1] += 1
            return generation

    replies = itertools.count()
    config = Config(steps=12, batch_size=1, group_size=2, max_staleness=8, evaluate_every_steps=3)
    run = scripted(config, rollout=turns, held_out=range(-5, 0), engines=[Swaps()])
    run.run()
    evaluations = check_pinned(run)
    assert [event.failed for event in evaluations][:2] == [0, 1]


def test_version_that_is_long_outdated_can_still_be_pulled(scripted: Scripted) -> None:
    """Every engine is busy with the version before for longer than two further steps take."""
    config = Config(steps=10, batch_size=1, group_size=1, max_staleness=8, evaluate_every_steps=4)
    run = scripted(
        config,
        rollout=turns,
        held_out=[-1],
        engines=[ScriptedEngine(update_s=20.0)],
        trainer=ScriptedTrainer(step_s=0.1),
    )
    run.run()
    assert [event.step for event in check_pinned(run)] == [0, 4, 10]


# -- its own accounting ----------------------------------------------------------------------------------------------


def test_what_is_held_out_is_counted_apart(scripted: Scripted) -> None:
    async def rollout(task: int, llm: LLM) -> float:
        reward = await turns(task, llm)
        if task == -1:
            raise ValueError("malformed answer")
        return reward

    config = Config(steps=4, batch_size=2, group_size=2, evaluate_every_steps=2)
    run = scripted(config, rollout=rollout, held_out=range(-4, 0))
    report = run.run()
    evaluations = run.pipeline._recorder.evaluations
    assert len(evaluations) == 3
    for evaluation in evaluations:
        assert (evaluation.tasks, evaluation.failed, evaluation.failures) == (4, 1, {"ValueError": 1})
        assert evaluation.duration_s >= 3.0
    trained = [one for batch in run.trainer.batches for one in batch.trajectories]
    assert report.trained_tokens == sum(one.sampled_tokens for one in trained)
    assert report.held_out_tokens == sum(evaluation.sampled_tokens for evaluation in evaluations) > 0
    assert (report.held_out_failures, report.accounting.failed_attempts) == (3, {})
    assert report.accounting.admitted == 4 * 2


def test_metrics_say_of_which_version_the_accuracy_is(scripted: Scripted) -> None:
    config = Config(steps=40, batch_size=2, group_size=2, evaluate_every_steps=10)
    run = scripted(config, rollout=turns, held_out=range(-4, 0))
    run.run()
    evaluated = {event.step: event for event in run.events_of(Evaluated)}
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["accuracy"] == evaluated[line["accuracy_version"]].reward
        assert line["accuracy_version"] == max(step for step, event in evaluated.items() if event.t <= line["t"])
    assert len({line["accuracy_version"] for line in lines}) > 2


def test_statistics_follow_an_evaluation(scripted: Scripted) -> None:
    config = Config(steps=40, batch_size=2, group_size=2, max_staleness=4, evaluate_every_steps=10)
    run = scripted(config, rollout=turns, held_out=range(-20, 0))
    seen: list[EvaluationProgress] = []

    async def watched() -> None:
        life = asyncio.ensure_future(run.pipeline.run())
        while not life.done():
            await asyncio.wait({life}, timeout=0.25)
            now = run.pipeline.statistics()
            if now.evaluation is not None:
                seen.append(now.evaluation)
                assert now.accuracy_version is None or now.accuracy_version < now.evaluation.version
        life.result()

    virtually(watched())
    assert {each.version for each in seen} == {event.step for event in run.events_of(Evaluated)}
    assert {each.tasks for each in seen} == {20}
    assert len({each.played for each in seen}) > 1


# -- engines that die ------------------------------------------------------------------------------------------------


class DiesOnce(ScriptedEngine):
    """Dies at its first answer to a held-out task after training has begun, and comes back."""

    died = False

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        if request.request_id.startswith("0.") and self.version > 0 and not self.died:
            self.died = True
            raise EngineGoneError("the server is gone")
        return generation


@pytest.mark.parametrize("others", [0, 1])
def test_engine_that_dies_while_it_is_held_comes_back_to_the_version(scripted: Scripted, others: int) -> None:
    config = Config(steps=60, batch_size=2, group_size=2, max_staleness=1, evaluate_every_steps=5, engine_restarts=3)
    engines = [DiesOnce() for _ in range(1 + others)]
    run = scripted(config, rollout=turns, held_out=range(-8, 0), engines=engines)
    report = run.run()
    assert report.fleet.deaths > 0
    assert len(check_pinned(run)) > 2
    assert (report.steps, report.held_out_failures) == (60, 0)


def test_engine_that_dies_in_the_last_evaluation_comes_back_to_it(scripted: Scripted) -> None:
    config = Config(steps=3, batch_size=1, group_size=2, engine_restarts=3)
    run = scripted(config, rollout=turns, held_out=range(-4, 0), engines=[DiesOnce()])
    report = run.run()
    assert report.fleet.deaths == 1
    assert [(event.step, event.versions) for event in check_pinned(run)] == [(0, (0, 0)), (3, (3, 3))]
    assert report.held_out_failures == 0


def test_engine_that_dies_for_good_while_it_is_held_costs_that_evaluation_alone(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(steps=30, batch_size=2, group_size=2, evaluate_every_steps=5, engine_restarts=0)
    run = scripted(config, rollout=turns, held_out=range(-8, 0), engines=[DiesOnce(), ScriptedEngine()])
    report = run.run()
    begun = [event.version for event in run.events_of(EvaluationBegan)]
    ended = [event.step for event in run.events_of(Evaluated)]
    [given_up] = set(begun) - set(ended)
    assert f"version {given_up} is not evaluated" in caplog.text
    assert ended[-1] == 30
    assert (report.steps, report.fleet.retired, report.held_out_failures) == (30, 1, 0)


@pytest.mark.parametrize("mode", ["keep", "recompute", "drain", "abort"])
def test_every_mode_of_a_sync_leaves_an_evaluation_alone(scripted: Scripted, mode: SyncMode) -> None:
    config = Config(steps=20, batch_size=2, group_size=2, max_staleness=2, evaluate_every_steps=5)
    engines = [ScriptedEngine(update_s=0.3, capacity=8) for _ in range(2)]
    run = scripted(config, rollout=turns, held_out=range(-6, 0), engines=engines, coordinator=LeastLoad(sync_mode=mode))
    report = run.run()
    assert len(check_pinned(run)) > 2
    assert report.held_out_failures == 0
