"""One call over many requests: whatever comes between, what a rollout is told is what an undisturbed engine says."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import Scripted, ScriptedRun, virtually
from turbulence import END, MODES, Mortal, Restless, greedy, told

from staleflow import LLM, Config, ListTasks, Trajectory
from staleflow.continuation import MAX_FRUITLESS
from staleflow.coordinator import Command, LeastLoad, Migrate, Snapshot
from staleflow.errors import EngineError, TooManyFailuresError
from staleflow.events import Interrupted, Routed, Synced
from staleflow.fleet import Fleet
from staleflow.store import TrajectoryStore
from staleflow.testing import ScriptedEngine
from staleflow.types import GenerateRequest, Generation, Interruption, SyncMode

MAX_NEW_TOKENS = 24
SMALL = Config(steps=2, batch_size=2, group_size=2)


class Told:
    """A rollout of two turns that keeps what it was told, by prompt."""

    def __init__(self) -> None:
        self.answers: list[tuple[list[int], list[int], str]] = []

    async def __call__(self, task: int, llm: LLM) -> float:
        text = [1 + task % 5, task % 11]
        for turn in ([], [7, 3]):
            text += turn
            answer = await llm.generate(turn or text, max_new_tokens=MAX_NEW_TOKENS)
            self.answers.append((list(text), answer.token_ids, answer.finish_reason))
            text += answer.token_ids
        return float(sum(answer.token_ids) % 3)

    def check(self) -> None:
        assert self.answers
        for prompt, tokens, reason in self.answers:
            assert tokens == told(prompt, MAX_NEW_TOKENS)
            assert reason == ("length" if len(tokens) == MAX_NEW_TOKENS else "stop")
            assert END not in tokens[:-1]


def trained(run: ScriptedRun) -> list[Trajectory]:
    return [trajectory for batch in run.trainer.batches for trajectory in batch.trajectories]


def check_records(run: ScriptedRun) -> None:
    """Every sampled token has a logprob and a version, and an interrupted request leaves no empty segment."""
    for trajectory in trained(run):
        for segment in trajectory.segments:
            assert segment.token_ids
            assert len(segment.logprobs) == len(segment.versions) == len(segment.token_ids) * segment.sampled


class LetsGo(ScriptedEngine):
    """Lets go of its nth request after so many tokens, while there are points left."""

    def __init__(self, points: list[int]) -> None:
        super().__init__(greedy)
        self.points = points

    async def generate(self, request: GenerateRequest) -> Generation:
        point = self.points.pop(0) if self.points else request.max_new_tokens
        whole = await super().generate(request)
        if point >= len(whole.token_ids):
            return whole
        return Generation(
            request.request_id,
            whole.token_ids[:point],
            whole.logprobs[:point],
            whole.versions[:point],
            "interrupted",
        )


@given(points=st.lists(st.integers(0, 12), max_size=40), engines=st.integers(1, 3))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_interrupted_at_any_point_equals_uninterrupted(scripted: Scripted, points: list[int], engines: int) -> None:
    rollout = Told()
    # One list of points for all: the rest of an interrupted call is as likely to go elsewhere.
    run = scripted(SMALL, rollout=rollout, engines=[LetsGo(points) for _ in range(engines)])
    report = run.run()
    rollout.check()
    check_records(run)
    assert report.accounting.failed_attempts == {}
    assert set(report.fleet.interrupted) <= {Interruption.ENGINE}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_every_mode_and_migration_equal_uninterrupted(scripted: Scripted, mode: SyncMode, seed: int) -> None:
    rollout = Told()
    engines = [ScriptedEngine(greedy, seed=seed + index, token_s=0.05, capacity=6) for index in range(3)]
    run = scripted(
        Config(steps=8, batch_size=2, group_size=2, drain_timeout_s=0.3),
        rollout=rollout,
        engines=engines,
        coordinator=Restless(seed, [mode]),
    )
    report = run.run()
    rollout.check()
    check_records(run)
    assert report.accounting.failed_attempts == {}
    interrupted = report.fleet.interrupted
    assert interrupted.pop(Interruption.MIGRATE) > 0
    expected = {"keep": set(), "recompute": {"recompute"}, "drain": {"drain"}, "abort": {"abort"}}[mode]
    assert set(interrupted) == expected
    assert (report.fleet.discarded_tokens > 0) == (mode == "abort")


def test_migrated_request_goes_on_where_it_was_sent(scripted: Scripted) -> None:
    class MovesOnce(LeastLoad):
        moved: Migrate | None = None

        def decide(self, snapshot: Snapshot) -> list[Command]:
            commands = super().decide(snapshot)
            if self.moved is None and snapshot.running:
                request = snapshot.running[0]
                self.moved = Migrate(request.request_id, 1 - request.engine)
                commands.append(self.moved)
            return commands

    coordinator, rollout = MovesOnce(), Told()
    engines = [ScriptedEngine(greedy), ScriptedEngine(greedy)]
    run = scripted(SMALL, rollout=rollout, engines=engines, coordinator=coordinator)
    run.run()
    rollout.check()
    [interrupted] = run.events_of(Interrupted)
    moved = coordinator.moved
    assert moved is not None
    assert (interrupted.request, interrupted.why) == (moved.request_id, Interruption.MIGRATE)
    group, member, attempt, count = moved.request_id.split(".")
    successor = f"{group}.{member}.{attempt}.{int(count) + 1}"
    assert [event.engine for event in run.events_of(Routed) if event.request == successor] == [moved.engine]


def test_L9_abort_leaves_one_version_in_a_call_and_says_what_it_threw_away(scripted: Scripted) -> None:
    engines = [ScriptedEngine(greedy, token_s=0.05, seed=index) for index in range(2)]
    run = scripted(
        Config(steps=12, batch_size=2, group_size=2, max_staleness=3),
        rollout=Told(),
        engines=engines,
        coordinator=LeastLoad(sync_mode="abort"),
    )
    report = run.run()
    for trajectory in trained(run):
        assert all(len(set(segment.versions)) <= 1 for segment in trajectory.segments)
        # Two calls, two segments: nothing of an aborted one remains.
        assert [segment.sampled for segment in trajectory.segments] == [False, True, False, True]
    thrown_away = sum(event.tokens for event in run.events_of(Interrupted))
    assert report.fleet.discarded_tokens == thrown_away > 0


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_W10_recompute_keeps_behaviour_logprobs_and_adds_those_of_the_new_weights(
    scripted: Scripted, mode: SyncMode
) -> None:
    run = scripted(
        Config(steps=12, batch_size=2, group_size=2, max_staleness=3),
        rollout=Told(),
        engines=[ScriptedEngine(greedy, token_s=0.05)],
        coordinator=LeastLoad(sync_mode=mode),
    )
    run.run()
    with_prefix = [trajectory for trajectory in trained(run) if trajectory.prefix is not None]
    assert bool(with_prefix) == (mode == "recompute")
    for trajectory in trained(run):
        assert {logprob for segment in trajectory.segments for logprob in segment.logprobs} == {-1.0}
    for trajectory in with_prefix:
        prefix = trajectory.prefix
        assert prefix is not None
        # The tokens before it are of older versions, and the one after it is of its own.
        older, after = trajectory.versions[: len(prefix.logprobs)], trajectory.versions[len(prefix.logprobs)]
        assert max(older) < prefix.version == after
        assert prefix.logprobs == [-1.0 - prefix.version] * len(prefix.logprobs)


def test_recompute_asks_for_prompt_logprobs_only_where_there_is_something_to_learn(scripted: Scripted) -> None:
    engine = ScriptedEngine(greedy, token_s=0.05)
    run = scripted(
        Config(steps=8, batch_size=2, group_size=2),
        rollout=Told(),
        engines=[engine],
        coordinator=LeastLoad(sync_mode="recompute"),
    )
    run.run()
    why = {event.request: event.why for event in run.events_of(Interrupted)}
    assert Counter(request.prompt_logprobs for request in engine.requests)[True] > 0
    assert Counter(why.values())[Interruption.RECOMPUTE] >= sum(request.prompt_logprobs for request in engine.requests)


class SubmitsSlowly(ScriptedEngine):
    """A request is on its way for a while, and an interruption that comes meanwhile is missed."""

    def __init__(self) -> None:
        super().__init__(greedy, token_s=0.05)
        self.on_the_way: set[str] = set()
        self.updated_while_running: list[set[str]] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.on_the_way.add(request.request_id)
        try:
            await asyncio.sleep(0.3)
        finally:
            self.on_the_way.discard(request.request_id)
        return await super().generate(request)

    async def update_weights(self, version: int, weights: Path) -> int:
        self.updated_while_running.append(self._running | self.on_the_way)
        await asyncio.sleep(0.05)
        self.version = version
        return version


@pytest.mark.parametrize("mode", ["recompute", "abort", "drain"])
def test_L18_no_request_runs_or_is_on_its_way_when_weights_change(scripted: Scripted, mode: SyncMode) -> None:
    engine, rollout = SubmitsSlowly(), Told()
    config = Config(steps=8, batch_size=2, group_size=2, drain_timeout_s=0.2)
    run = scripted(config, rollout=rollout, engines=[engine], coordinator=LeastLoad(sync_mode=mode))
    run.run()
    assert len(engine.updated_while_running) == len(run.events_of(Synced)) > 3
    assert not any(engine.updated_while_running)
    rollout.check()


def test_L18_request_interrupted_before_the_engine_hears_of_it_never_reaches_it() -> None:
    """Between its dispatch and the first line of the engine's ``generate`` there is a moment."""

    async def main() -> None:
        store: TrajectoryStore[int] = TrajectoryStore()
        engine = ScriptedEngine(greedy)
        fleet = Fleet([engine], store, lambda: 0, lambda: None)
        fleet.started(fleet.states[0])
        for yields in range(4):
            name = f"request {yields}"
            asking = asyncio.ensure_future(fleet.generate(GenerateRequest(name, [1], 8), min_version=0))
            await asyncio.sleep(0)
            assert fleet.dispatch(name, 0)
            for _ in range(yields):
                await asyncio.sleep(0)
            await fleet.interrupt(name, Interruption.RECOMPUTE)
            answer = await asking
            assert answer.why is Interruption.RECOMPUTE
            assert answer.generation.token_ids == []
        assert len(engine.requests) < 4
        assert fleet.states[0].empty.is_set()

    virtually(main())


def test_drain_lets_requests_finish(scripted: Scripted) -> None:
    run = scripted(
        Config(steps=8, batch_size=2, group_size=2),
        rollout=Told(),
        engines=[ScriptedEngine(greedy, token_s=0.05, seed=index) for index in range(2)],
        coordinator=LeastLoad(sync_mode="drain"),
    )
    report = run.run()
    assert report.fleet.interrupted == {}
    assert all(len(set(segment.versions)) <= 1 for trajectory in trained(run) for segment in trajectory.segments)


def test_engine_that_interrupts_without_end_fails_the_attempt(scripted: Scripted) -> None:
    class NeverAnswers(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            self.requests.append(request)
            return Generation(request.request_id, [], [], [], "interrupted")

    engine = NeverAnswers()
    error = scripted(SMALL, engines=[engine]).fail(TooManyFailuresError)
    assert isinstance(error.__cause__, EngineError)
    assert f"interrupted {MAX_FRUITLESS} times in a row" in str(error.__cause__)
    assert Counter(request.request_id.rpartition(".")[0] for request in engine.requests)["1.0.0"] == MAX_FRUITLESS


@pytest.mark.parametrize("tokens", [MAX_NEW_TOKENS, 3])
def test_call_that_has_all_its_tokens_has_ended_though_it_was_interrupted(scripted: Scripted, tokens: int) -> None:
    """The engine says interrupted with its last token: there is nothing left to ask for."""

    class LetsGoAtTheEnd(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            return msgspec.structs.replace(await super().generate(request), finish_reason="interrupted")

    reasons: list[str] = []

    async def rollout(task: int, llm: LLM) -> float:
        answer = await llm.generate([1], max_new_tokens=tokens)
        reasons.append(answer.finish_reason)
        assert len(answer.token_ids) == tokens
        return 1.0

    run = scripted(SMALL, rollout=rollout, engines=[LetsGoAtTheEnd(lambda request, rng: [1] * request.max_new_tokens)])
    report = run.run()
    assert set(reasons) == {"length"}
    assert report.accounting.failed_attempts == {}


def test_call_as_long_as_the_model_allows_can_be_interrupted(scripted: Scripted) -> None:
    class Short(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            assert len(request.token_ids) + request.max_new_tokens == self.max_model_tokens
            whole = await super().generate(request)
            half = len(whole.token_ids) // 2
            if half == 0:
                return whole
            return Generation(request.request_id, whole.token_ids[:half], [-1.0] * half, [0] * half, "interrupted")

    engine = Short(lambda request, rng: [1] * request.max_new_tokens)
    engine.max_model_tokens = 40

    async def rollout(task: int, llm: LLM) -> float:
        return float(len((await llm.generate([1], max_new_tokens=39)).token_ids))

    report = scripted(Config(steps=1, batch_size=1, group_size=1), rollout=rollout, engines=[engine]).run()
    assert report.trained_tokens == 39


@pytest.mark.parametrize("mode", MODES)
def test_B1_trained_lengths_are_the_offered_lengths(scripted: Scripted, mode: SyncMode) -> None:
    """Every task is trained once, with all that it takes, however often it was interrupted."""
    tasks = 40

    async def rollout(task: int, llm: LLM) -> float:
        return float(len((await llm.generate([task], max_new_tokens=60)).token_ids))

    def lengths(request: GenerateRequest, rng: object) -> list[int]:
        sampled = len(request.token_ids) - 1
        return [1] * ((7 * request.token_ids[0]) % 60 + 1 - sampled)

    run = scripted(
        Config(steps=tasks // 4, batch_size=4, group_size=2, max_staleness=2, drain_timeout_s=0.5),
        tasks=ListTasks(range(tasks), epochs=1, seed=None),
        rollout=rollout,
        engines=[ScriptedEngine(lengths, seed=seed, token_s=0.05, capacity=8) for seed in range(2)],
        coordinator=Restless(1, [mode], moves=0.05),
    )
    run.run()
    offered = Counter(dict.fromkeys(range(tasks), 2))
    assert Counter(trajectory.task for trajectory in trained(run)) == offered
    for trajectory in trained(run):
        assert trajectory.sampled_tokens == (7 * trajectory.task) % 60 + 1


def test_V10_stamps_are_of_tokens_and_not_of_requests(scripted: Scripted) -> None:
    run = scripted(
        Config(steps=8, batch_size=2, group_size=2),
        rollout=Told(),
        engines=[LetsGo([0, 0, 3, 0, 5] * 8)],
    )
    run.run()
    interrupted = {event.request: event for event in run.events_of(Interrupted)}
    for trajectory in trained(run):
        name = f"{trajectory.group}.{trajectory.member}.{trajectory.attempt}"
        counts = (interrupted.get(f"{name}.{count}") for count in range(trajectory.requests))
        empty_s = [event.t for event in counts if event is not None and event.tokens == 0]
        assert trajectory.first_segment_s is not None
        assert trajectory.finished_s is not None
        assert trajectory.admitted_s < trajectory.first_segment_s <= trajectory.finished_s
        if f"{name}.0" in interrupted and interrupted[f"{name}.0"].tokens == 0:
            assert trajectory.first_segment_s > empty_s[0]


@pytest.mark.parametrize("seed", range(3))
def test_mortal_engines_equal_immortal_ones(scripted: Scripted, seed: int) -> None:
    rollout = Told()
    run = scripted(
        Config(steps=12, batch_size=2, group_size=2, engine_restarts=1000),
        rollout=rollout,
        engines=[Mortal(100 * seed + index, mean_life_s=2.0) for index in range(2)],
    )
    report = run.run()
    rollout.check()
    check_records(run)
    assert report.fleet.deaths > 0
    assert report.accounting.failed_attempts == {}
