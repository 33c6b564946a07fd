"""Engines die, at any moment of a run: it costs time and nothing else, until none is left."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from support import Scripted, one_turn, virtually

from staleflow import LLM, Config
from staleflow.coordinator import LeastLoad
from staleflow.errors import ConfigError, EngineError, EngineGoneError
from staleflow.events import EngineDied, EngineRestarted, EngineRetired, Finished, Published, Routed, Synced
from staleflow.supervision import GOOD_WHILE_S
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest, Generation, StepMetrics, SyncMode, TrainBatch
from staleflow.weight_sync import QUIESCE_TIMEOUT_S

CONFIG = Config(steps=20, batch_size=2, group_size=2)
KILLED = "engine was ended by SIGKILL"


class DiesAt(ScriptedEngine):
    """Dies so many seconds after each of its first starts, then lives."""

    def __init__(self, *lives_s: float, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.lives_s = list(lives_s)
        self.starts = 0

    async def start(self, name: str, log_folder: Path) -> None:
        assert self.starts == 0 or self.stopped, "what is left of a dead engine is cleared away first"
        self.starts += 1
        await super().start(name, log_folder)

    async def run(self) -> None:
        if self.lives_s:
            await asyncio.sleep(self.lives_s.pop(0))
            raise EngineError(KILLED)
        await super().run()


@pytest.mark.parametrize("engines", [1, 2])
def test_death_fails_no_rollout_and_the_engine_comes_back(scripted: Scripted, engines: int) -> None:
    run = scripted(CONFIG, engines=[DiesAt(1.0), *(ScriptedEngine(seed=n) for n in range(1, engines))])
    report = run.run()
    assert report.accounting.failed_attempts == {}
    assert (report.fleet.deaths, report.fleet.restarts, report.fleet.retired) == (1, 1, 0)
    assert report.fleet.interrupted["death"] > 0
    assert [(event.engine, event.cause) for event in run.events_of(EngineDied)] == [(0, KILLED)]
    assert [(event.engine, event.epoch) for event in run.events_of(EngineRestarted)] == [(0, 1)]


def test_W3_restarted_engine_serves_nothing_before_it_has_confirmed_a_published_version(scripted: Scripted) -> None:
    run = scripted(CONFIG, engines=[DiesAt(1.5), ScriptedEngine(seed=1)])
    run.run()
    events = run.events()
    [restarted] = run.events_of(EngineRestarted)
    after = events[events.index(restarted) :]
    serves = next(event for event in after if isinstance(event, Synced) and event.engine == 0)
    published = max(event.version for event in events[: events.index(serves)] if isinstance(event, Published))
    assert serves.version == published > 0
    first = next(event for event in after if isinstance(event, Routed) and event.engine == 0)
    assert events.index(first) > events.index(serves)


def test_W3_flaky_engine_is_given_up(scripted: Scripted) -> None:
    run = scripted(CONFIG, engines=[DiesAt(*[0.5] * 100), ScriptedEngine(seed=1, token_s=0.2)])
    report = run.run()
    assert (report.fleet.deaths, report.fleet.restarts, report.fleet.retired) == (4, 3, 1)
    # Pauses double.
    assert [event.t for event in run.events_of(EngineDied)] == pytest.approx([0.5, 2.0, 4.5, 9.0])
    assert [event.cause for event in run.events_of(EngineRetired)] == [KILLED]


def test_W3_restarts_count_afresh_after_a_good_while(scripted: Scripted) -> None:
    config = Config(steps=40, batch_size=2, group_size=2, engine_restarts=1)
    engine = DiesAt(1.0, GOOD_WHILE_S + 30)
    report = scripted(config, engines=[engine], trainer=ScriptedTrainer(step_s=20.0)).run()
    assert (report.fleet.deaths, report.fleet.restarts, report.fleet.retired) == (2, 2, 0)


def test_W3_engine_that_answers_with_initial_weights_is_not_believed(scripted: Scripted) -> None:
    """It was started again behind the controller's back."""

    class Forgets(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            answer = await super().generate(request)
            return msgspec.structs.replace(answer, versions=[0] * len(answer.versions)) if self.version > 3 else answer

    run = scripted(CONFIG, engines=[Forgets(), ScriptedEngine(seed=1)])
    report = run.run()
    assert report.accounting.failed_attempts == {}
    assert report.fleet.restarts > 0
    assert all("answers with version 0, and had confirmed" in event.cause for event in run.events_of(EngineDied))


def test_H10_run_ends_when_the_last_engine_is_given_up_with_its_own_error(scripted: Scripted) -> None:
    engines = [DiesAt(*[0.5] * 100), DiesAt(*[3.0] * 100)]
    run = scripted(msgspec.structs.replace(CONFIG, steps=10_000, engine_restarts=1), engines=engines)
    assert str(run.fail(EngineError)) == KILLED
    assert [event.engine for event in run.events_of(EngineRetired)] == [0, 1]
    assert run.trainer.saved == [run.run_dir / "checkpoint"]


def test_run_ends_when_no_engine_has_served_for_too_long(scripted: Scripted) -> None:
    class ComesBackSlowly(DiesAt):
        async def start(self, name: str, log_folder: Path) -> None:
            await super().start(name, log_folder)
            await asyncio.sleep(500.0 if self.starts > 1 else 0.0)

    config = msgspec.structs.replace(CONFIG, no_engine_timeout_s=100.0)
    run = scripted(config, engines=[ComesBackSlowly(1.0), ComesBackSlowly(2.0)])

    async def main() -> float:
        with pytest.raises(EngineError, match=r"no engine has served for 100 s \(no_engine_timeout_s\).*SIGKILL"):
            await run.pipeline.run()
        return asyncio.get_running_loop().time()

    assert virtually(main()) == pytest.approx(102.0)
    run.check_wound_down()


@pytest.mark.parametrize("outage_s", [5.0, 50.0])
def test_time_without_engines_does_not_count_against_rollouts(scripted: Scripted, outage_s: float) -> None:
    class Reloads(DiesAt):
        async def start(self, name: str, log_folder: Path) -> None:
            await super().start(name, log_folder)
            await asyncio.sleep(outage_s if self.starts > 1 else 0.0)

    config = msgspec.structs.replace(CONFIG, rollout_timeout_s=1.0)
    report = scripted(config, engines=[Reloads(0.5, 0.5)]).run()
    assert report.accounting.failed_attempts == {}
    assert report.fleet.restarts == 2


def test_time_that_a_dead_engine_had_a_request_does_not_count(scripted: Scripted) -> None:
    """A long request is nearly done when its engine dies, and is played once more elsewhere."""

    async def long(task: int, llm: LLM) -> float:
        return float(len((await llm.generate([1], max_new_tokens=8)).token_ids) + task % 2)

    class Steady(DiesAt):
        async def generate(self, request: GenerateRequest) -> Generation:
            await asyncio.sleep(9.0)
            return Generation(request.request_id, [1], [-1.0], [self.version], "stop")

    config = Config(steps=2, batch_size=2, group_size=2, rollout_timeout_s=10.0, max_staleness=0)
    report = scripted(config, rollout=long, engines=[Steady(8.0), Steady()]).run()
    assert report.accounting.failed_attempts == {}
    assert report.fleet.interrupted["death"] > 0


def test_slow_rollout_still_times_out(scripted: Scripted) -> None:
    class Hangs(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            await asyncio.sleep(1000.0 if request.request_id.startswith("1.0.0") else 0.0)
            return await super().generate(request)

    config = msgspec.structs.replace(CONFIG, rollout_timeout_s=5.0)
    report = scripted(config, engines=[Hangs(), DiesAt(1.0)]).run()
    assert report.accounting.failed_attempts == {"RolloutTimeoutError": 1}


def test_run_goes_on_with_the_engines_that_are_left(scripted: Scripted) -> None:
    config = msgspec.structs.replace(CONFIG, engine_restarts=0)
    run = scripted(config, engines=[DiesAt(1.0), DiesAt(0.0), ScriptedEngine(seed=1)])
    report = run.run()
    assert report.accounting.failed_attempts == {}
    assert (report.fleet.serving, report.fleet.restarts, report.fleet.retired) == (1, 0, 2)


def test_several_engines_die_at_once(scripted: Scripted) -> None:
    run = scripted(CONFIG, engines=[DiesAt(1.0, 1.0, seed=n) for n in range(4)])
    report = run.run()
    assert report.accounting.failed_attempts == {}
    assert (report.fleet.deaths, report.fleet.restarts) == (8, 8)


def test_H9_death_during_start_is_tried_again(scripted: Scripted) -> None:
    class StartsAtTheThirdAttempt(ScriptedEngine):
        attempts = 0

        async def start(self, name: str, log_folder: Path) -> None:
            self.attempts += 1
            await asyncio.sleep(1.0)
            if self.attempts < 3:
                raise EngineError(f"{name} exited with code 1")
            await super().start(name, log_folder)

    run = scripted(CONFIG, engines=[StartsAtTheThirdAttempt(), StartsAtTheThirdAttempt()])
    report = run.run()
    assert (report.fleet.deaths, report.fleet.restarts) == (4, 2)


def test_wrong_setting_found_at_start_ends_the_run_at_once(scripted: Scripted) -> None:
    class WrongModel(ScriptedEngine):
        async def start(self, name: str, log_folder: Path) -> None:
            raise ConfigError("another model is behind this URL")

    run = scripted(CONFIG, engines=[ScriptedEngine(), WrongModel()])
    run.fail(ConfigError)
    assert run.events()[-1].t == 0


@pytest.mark.parametrize("mode", ["keep", "recompute", "drain", "abort"])
@pytest.mark.parametrize("how", ["raises", "lies", "hangs and dies"])
def test_V11_failed_update_counts_for_nothing(scripted: Scripted, mode: SyncMode, how: str) -> None:
    class FailsOnce(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.failed = False
            self.dead = asyncio.Event()

        async def update_weights(self, version: int, weights: Path) -> int:
            if version < 3 or self.failed:
                return await super().update_weights(version, weights)
            self.failed = True
            if how == "raises":
                raise EngineError("half of the weights are there")
            if how == "lies":
                return version - 1
            self.dead.set()
            await asyncio.sleep(1000.0)
            return version

        async def run(self) -> None:
            await self.dead.wait()
            self.dead.clear()
            await asyncio.sleep(0.5)
            raise EngineError(KILLED)

    engines = [FailsOnce(), ScriptedEngine(seed=1)]
    run = scripted(CONFIG, engines=engines, coordinator=LeastLoad(sync_mode=mode))
    report = run.run()
    assert report.accounting.failed_attempts == {}
    assert (report.fleet.deaths, report.fleet.restarts) == (1, 1)
    [died] = run.events_of(EngineDied)
    assert {"raises": "could not be updated to version 3", "lies": "confirmed version 2", "hangs and dies": KILLED}[
        how
    ] in died.cause
    assert 3 not in [event.version for event in run.events_of(Synced) if event.engine == 0]


def test_W2_dead_engine_holds_up_no_sync_of_another(scripted: Scripted) -> None:
    """It hangs in its update and dies; the others' syncs go on, and nobody asks the dead one."""

    class HangsInUpdate(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[int] = []

        async def update_weights(self, version: int, weights: Path) -> int:
            self.asked.append(version)
            await asyncio.sleep(1000.0)
            return version

        async def run(self) -> None:
            await asyncio.sleep(3.0)
            raise EngineError(KILLED)

    hangs = HangsInUpdate()
    config = msgspec.structs.replace(CONFIG, steps=40, engine_restarts=0)
    run = scripted(config, engines=[hangs, ScriptedEngine(seed=1)])
    report = run.run()
    assert report.steps == 40
    assert hangs.asked == [1]
    assert {event.engine for event in run.events_of(Synced)} == {1}


@pytest.mark.parametrize("mode", ["recompute", "abort"])
def test_engine_that_does_not_let_go_is_taken_for_dead(scripted: Scripted, mode: SyncMode) -> None:
    class Deaf(ScriptedEngine):
        async def interrupt(self, request_id: str) -> None:
            await asyncio.sleep(1000.0)

        async def generate(self, request: GenerateRequest) -> Generation:
            await asyncio.sleep(0.0 if self.version == 0 else 1000.0)
            return await super().generate(request)

    config = msgspec.structs.replace(CONFIG, engine_restarts=0, rollout_timeout_s=500.0)
    run = scripted(config, engines=[Deaf(), ScriptedEngine(seed=1)], coordinator=LeastLoad(sync_mode=mode))
    report = run.run()
    assert report.accounting.failed_attempts == {}
    [died] = run.events_of(EngineDied)
    assert "did not let go of" in died.cause
    assert f"within {QUIESCE_TIMEOUT_S:.0f} s" in died.cause


@pytest.mark.parametrize("answers_s", [0.2, 3.0])
def test_L11_answer_of_a_former_life_counts_for_nothing(scripted: Scripted, answers_s: float) -> None:
    """Both answer: the engine that was given up for dead, and the one that has gone on for it."""

    class AnswersLate(ScriptedEngine):
        late = 0
        deaths = 0

        async def generate(self, request: GenerateRequest) -> Generation:
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                await asyncio.sleep(answers_s)
                self.late += 1
                return Generation(request.request_id, [9] * 3, [-1.0] * 3, [10_000] * 3, "stop")

        async def run(self) -> None:
            await asyncio.sleep(1.0)
            self.deaths += 1
            if self.deaths < 3:
                raise EngineError(KILLED)
            await super().run()

    engine = AnswersLate(lambda request, rng: [1] * request.max_new_tokens, token_s=0.1)
    run = scripted(CONFIG, engines=[engine, ScriptedEngine(lambda request, rng: [1] * 8, seed=1)])
    report = run.run()
    assert engine.late > 0
    assert report.accounting.failed_attempts == {}
    assert all(t.token_ids.count(9) == 0 or t.task % 10 == 9 for b in run.trainer.batches for t in b.trajectories)


def test_request_that_finds_its_engine_gone_goes_on_elsewhere(scripted: Scripted) -> None:
    class Gone(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            if len(self.requests) == 10:
                self.requests.append(request)
                raise EngineGoneError("connection refused")
            return await super().generate(request)

    run = scripted(CONFIG, engines=[Gone(), ScriptedEngine(seed=1)])
    report = run.run()
    assert report.accounting.failed_attempts == {}
    assert [event.cause for event in run.events_of(EngineDied)] == ["connection refused"]


@pytest.mark.parametrize("at", ["before the first step", "after the last step"])
def test_H11_death_during_evaluation(scripted: Scripted, at: str) -> None:
    """After the last step no version comes any more; the one there is will do."""

    class DiesInEvaluation(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.deaths = 0
            self.evaluating = asyncio.Event()

        async def generate(self, request: GenerateRequest) -> Generation:
            group, _, version, _ = request.request_id.split(".")
            if group == "0" and (version == "0") == (at == "before the first step"):
                self.evaluating.set()
            return await super().generate(request)

        async def run(self) -> None:
            await self.evaluating.wait()
            await asyncio.sleep(0.02)
            self.deaths += 1
            if self.deaths == 1:
                raise EngineError(KILLED)
            await super().run()

    config = msgspec.structs.replace(CONFIG, steps=4)
    run = scripted(config, engines=[DiesInEvaluation()], held_out=range(20))
    report = run.run()
    assert report.held_out_failures == 0
    assert report.fleet.restarts == 1
    assert report.accounting.failed_attempts == {}


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_death_during_shutdown_changes_nothing(scripted: Scripted, ends: str) -> None:
    class SavesSlowly(ScriptedTrainer):
        async def save(self, folder: Path) -> None:
            killed.set()
            await asyncio.sleep(5.0)
            await super().save(folder)

        async def step(self, batch: TrainBatch) -> StepMetrics:
            if self.steps == 3 and ends == "with an error":
                raise ValueError("loss nan")
            return await super().step(batch)

    class DiesWhenTold(ScriptedEngine):
        async def run(self) -> None:
            await killed.wait()
            raise EngineError(KILLED)

    killed = asyncio.Event()
    run = scripted(CONFIG, engines=[DiesWhenTold()], trainer=SavesSlowly())
    if ends == "well":
        assert run.run().steps == CONFIG.steps
    else:
        assert str(run.fail(ValueError)) == "loss nan"


def test_cancelled_while_an_engine_is_started_again(scripted: Scripted) -> None:
    class Reloads(DiesAt):
        async def start(self, name: str, log_folder: Path) -> None:
            await super().start(name, log_folder)
            await asyncio.sleep(100.0 if self.starts > 1 else 0.0)

    run = scripted(CONFIG, engines=[Reloads(1.0)])

    async def main() -> None:
        running = asyncio.ensure_future(run.pipeline.run())
        await asyncio.sleep(10.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    virtually(main())
    run.check_wound_down()


def test_V9_death_in_the_middle_of_a_trajectory_counts_from_its_first_token(scripted: Scripted) -> None:
    async def pauses(task: int, llm: LLM) -> float:
        await one_turn(task, llm)
        await asyncio.sleep(0.5)
        return await one_turn(task, llm)

    run = scripted(CONFIG, rollout=pauses, engines=[DiesAt(*[1.1] * 3), ScriptedEngine(seed=1)])
    run.run()
    finished = {(event.group, event.member): event.versions for event in run.events_of(Finished)}
    for batch in run.trainer.batches:
        for trajectory in batch.trajectories:
            assert finished[trajectory.group, trajectory.member] == (
                min(trajectory.versions),
                max(trajectory.versions),
            )
