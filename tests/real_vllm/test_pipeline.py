"""Whole runs on real servers. What those have said is held against plain forward passes, token by token."""

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import load, plain_logprobs
from safetensors.torch import save_file
from support import Replay, read_events

import staleflow
from staleflow import LLM, Config, ListTasks, Report, Trajectory, VllmEngine, VllmServer
from staleflow.coordinator import Command, Coordinator, Health, LeastLoad, Migrate, RunningRequest, Snapshot
from staleflow.events import EngineDied, EngineRestarted, Event, Interrupted, Routed
from staleflow.rollout import Rollout
from staleflow.testing import ScriptedTrainer, character_llama
from staleflow.trainer.base import Trainer
from staleflow.types import Interruption, StepMetrics, SyncMode, TrainBatch

from .conftest import ALPHABET, RealServer, always_says

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.usefixtures("one_thread")]

EOS = 1
TURNS_TOKENS = (40, 80, 120, 160)
"""So that the turns of two groups hardly ever end together: when one ends, others are under way."""
TIE = 1e-3
"""Logits that differ by less are equal, up to the order in which float32 is summed up."""


class Models:
    """One model per version, all different, so that a token tells which of them has sampled it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[int, Any] = {}

    def folder(self, version: int) -> Path:
        folder = self._folder / f"version-{version}"
        if not folder.exists():
            talkative_llama(folder, seed=version)
        return folder

    def loaded(self, version: int) -> Any:
        if version not in self._loaded:
            self._loaded[version] = load(self.folder(version))
        return self._loaded[version]

    def check(self, trajectory: Trajectory) -> None:
        """Every token is what its version would have said after all tokens before it, and so is its logprob."""
        import torch

        text = trajectory.token_ids
        with torch.no_grad():
            by_version = {
                version: self.loaded(version)(torch.tensor([text])).logits[0].double()
                for version in set(trajectory.versions)
            }
        place = 0
        for segment in trajectory.segments:
            for logprob, version in zip(segment.logprobs, segment.versions, strict=True):
                logits = by_version[version][place - 1]
                assert logits.max() - logits[text[place]] < TIE
                assert logits.log_softmax(-1)[text[place]] == pytest.approx(logprob, abs=TIE)
                place += 1
            place += 0 if segment.sampled else len(segment.token_ids)
        assert place == len(text)

    def check_prefix(self, trajectory: Trajectory) -> None:
        """What was recorded of the tokens before the newest sync is what its weights say of them."""
        assert trajectory.prefix is not None
        known = len(trajectory.prefix.logprobs)
        assert max(trajectory.versions[:known]) < trajectory.prefix.version == trajectory.versions[known]
        text = trajectory.token_ids
        logprobs = [None, *plain_logprobs(self.loaded(trajectory.prefix.version), text[:1], text[1:])]
        own = [segment.sampled for segment in trajectory.segments for _ in segment.token_ids]
        of_sampled = [logprob for logprob, sampled in zip(logprobs, own, strict=True) if sampled]
        assert trajectory.prefix.logprobs == pytest.approx(of_sampled[:known], abs=TIE)


def talkative_llama(folder: Path, *, seed: int) -> None:
    """A random Llama whose greedy text varies, and hardly ever ends."""
    import torch

    model = load(character_llama(folder, ALPHABET, max_tokens=4096, seed=seed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
        model.model.embed_tokens.weight[EOS] = 0
    model.save_pretrained(folder)


class Publishes(ScriptedTrainer):
    """Learns nothing, publishes the models that it is given, and keeps the batches.

    It takes no time, so that it is the engines that others wait for, and weights change while turns are under way.
    """

    def __init__(self, models: Models) -> None:
        super().__init__(step_s=0.0, publish_s=0.0)
        self._models = models

    async def publish(self, weights: Path) -> None:
        shutil.copy(self._models.folder(self.steps) / "model.safetensors", weights)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


async def two_turns(task: int, llm: LLM) -> float:
    for said in ([2 + task % 8, 3], [4, 5, 6]):
        answer = await llm.generate(said, max_new_tokens=TURNS_TOKENS[task % len(TURNS_TOKENS)])
    return float(sum(answer.token_ids) % 4)


def run(
    folder: Path,
    engines: Sequence[VllmEngine],
    trainer: Trainer,
    config: Config,
    *,
    coordinator: Coordinator | None = None,
    rollout: Rollout[int] = two_turns,
) -> tuple[Report, list[Event]]:
    """A run to its end, whose event log keeps the laws."""
    pipeline = staleflow.Pipeline(
        tasks=ListTasks(range(1000), seed=1),
        rollout=rollout,
        engines=engines,
        trainer=trainer,
        config=config,
        coordinator=coordinator,
        run_dir=folder / "run",
        progress=False,
    )
    report = asyncio.run(pipeline.run())
    events = read_events(pipeline.run_dir)
    replay = Replay(config)
    for event in events:
        replay.apply(event)
    replay.check(report)
    assert report.accounting.failed_attempts == {}
    return report, events


def interruptions(events: Sequence[Event], why: Interruption, *, tokens: int = 0) -> int:
    """How many requests an engine has let go of for this reason, after at least so many tokens."""
    return sum(isinstance(event, Interrupted) and event.why is why and event.tokens >= tokens for event in events)


def trained(trainer: ScriptedTrainer) -> list[Trajectory]:
    return [trajectory for batch in trainer.batches for trajectory in batch.trajectories]


def engines_of(trajectory: Trajectory) -> set[int | None]:
    return {segment.engine for segment in trajectory.segments if segment.sampled}


class MovesWhatHasSampled(LeastLoad):
    """When an engine has answered a request, one that it has had for longer goes on elsewhere.

    All requests of an engine sample in step, so that the one that is moved has sampled too.
    """

    def __init__(self, sync_mode: SyncMode) -> None:
        super().__init__(sync_mode=sync_mode)
        self._ran: tuple[RunningRequest, ...] = ()
        self._moved: set[str] = set()

    def decide(self, snapshot: Snapshot) -> list[Command]:
        commands = super().decide(snapshot)
        running = {request.request_id for request in snapshot.running}
        for ended in self._ran:
            if ended.request_id in running or ended.request_id in self._moved:
                continue
            other = snapshot.engines[1 - ended.engine]
            movable = (
                request.request_id
                for request in snapshot.running
                if request.engine == ended.engine and request.since_s <= ended.since_s
                if other.open and request.min_version <= other.version and request.request_id not in self._moved
            )
            request_id = next(movable, None)
            if request_id is not None:
                commands.append(Migrate(request_id, other.engine))
                self._moved.add(request_id)
        self._ran = snapshot.running
        return commands


@pytest.mark.parametrize("mode", ["recompute", "drain", "abort"])
def test_interrupted_trajectories_go_on_here_or_elsewhere_as_if_nothing_had_been(
    servers: list[RealServer], models: Models, tmp_path: Path, mode: SyncMode
) -> None:
    engines = [server.engine_at_version_0(models.folder(0), temperature=0.0) for server in servers]
    trainer = Publishes(models)
    config = Config(steps=6, batch_size=2, group_size=4, max_staleness=2, drain_timeout_s=1e-3)
    report, events = run(tmp_path, engines, trainer, config, coordinator=MovesWhatHasSampled(mode))
    assert interruptions(events, Interruption.MIGRATE, tokens=1) > 0
    assert interruptions(events, Interruption(mode), tokens=1) > 0
    assert (report.fleet.discarded_tokens > 0) == (mode == "abort")
    assert any(engines_of(trajectory) == {0, 1} for trajectory in trained(trainer))
    for trajectory in trained(trainer):
        models.check(trajectory)
    with_prefix = [trajectory for trajectory in trained(trainer) if trajectory.prefix is not None]
    assert bool(with_prefix) == (mode == "recompute")
    for trajectory in with_prefix:
        models.check_prefix(trajectory)


class SaysItsVersion(ScriptedTrainer):
    """Publishes models that say one token each."""

    def __init__(self, model: Path) -> None:
        super().__init__(step_s=0.0, publish_s=0.0)
        self._model = model

    async def publish(self, weights: Path) -> None:
        save_file(always_says(self._model, self.token(self.steps)), weights / "model.safetensors")

    @staticmethod
    def token(version: int) -> int:
        return 2 + version % len(ALPHABET)


def test_running_requests_go_on_with_new_weights_under_the_same_cache(
    servers: list[RealServer], model: Path, tmp_path: Path
) -> None:
    trainer = SaysItsVersion(model)
    first = tmp_path / "first"
    first.mkdir()
    save_file(always_says(model, trainer.token(0)), first / "model.safetensors")
    engines = [server.engine_at_version_0(first) for server in servers]
    config = Config(steps=10, batch_size=2, group_size=4, max_staleness=3)
    report, events = run(tmp_path, engines, trainer, config)
    assert not any(isinstance(event, Interrupted) for event in events)
    assert report.staleness_max > 0
    answers = [segment for trajectory in trained(trainer) for segment in trajectory.segments if segment.sampled]
    for answer in answers:
        assert answer.token_ids == [trainer.token(version) for version in answer.versions]
    assert any(len(set(answer.versions)) > 1 for answer in answers)


class Kills(LeastLoad):
    """Kills servers while they generate: at each version of the plan those that it names."""

    def __init__(self, servers: Sequence[VllmServer], plan: dict[int, list[int]]) -> None:
        super().__init__(sync_mode="recompute")
        self._servers = servers
        self._plan = dict(plan)
        self._killed: int | None = None
        self._deaths = [0 for _ in servers]
        self.all_back = {version: asyncio.Event() for version in plan}

    def decide(self, snapshot: Snapshot) -> list[Command]:
        victims = [snapshot.engines[index] for index in self._plan.get(snapshot.published, [])]
        if victims and all(victim.health is Health.HEALTHY and victim.running > 0 for victim in victims):
            del self._plan[snapshot.published]
            self._killed = snapshot.published
            for victim in victims:
                self._deaths[victim.engine] += 1
                os.kill(self._servers[victim.engine].pid, signal.SIGKILL)
        elif self._killed is not None and all(
            engine.health is Health.HEALTHY and engine.epoch == deaths
            for engine, deaths in zip(snapshot.engines, self._deaths, strict=True)
        ):
            self.all_back[self._killed].set()
        return super().decide(snapshot)


class WaitsForServers(Publishes):
    """Ends no step in which servers are killed before they are back."""

    def __init__(self, models: Models, all_back: dict[int, asyncio.Event]) -> None:
        super().__init__(models)
        self._all_back = all_back

    async def step(self, batch: TrainBatch) -> StepMetrics:
        if batch.step in self._all_back:
            await self._all_back[batch.step].wait()
        return await super().step(batch)


def test_servers_that_are_killed_cost_time_and_nothing_else(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = models.folder(0)
    servers = [VllmServer(folder) for _ in range(2)]
    engines = [VllmEngine(server, model=folder, temperature=0.0) for server in servers]
    coordinator = Kills(servers, {2: [0], 4: [0, 1]})
    trainer = WaitsForServers(models, coordinator.all_back)
    config = Config(steps=8, batch_size=2, group_size=4, max_staleness=2)
    report, events = run(tmp_path, engines, trainer, config, coordinator=coordinator)
    assert report.steps == 8
    assert (report.fleet.deaths, report.fleet.restarts, report.fleet.retired) == (3, 3, 0)
    assert interruptions(events, Interruption.DEATH) > 0
    lives = [(type(event), event.engine) for event in events if isinstance(event, EngineDied | EngineRestarted)]
    assert lives[:2] == [(EngineDied, 0), (EngineRestarted, 0)]
    assert sorted(engine for _, engine in lives[2:]) == [0, 0, 1, 1]
    accounts = [record.getMessage() for record in caplog.records if "is started again" in record.getMessage()]
    assert len(accounts) == 3
    assert all("was ended by SIGKILL. Last lines of" in account for account in accounts)
    served_again = {
        event.engine
        for place, event in enumerate(events)
        if isinstance(event, Routed)
        and any(isinstance(earlier, EngineRestarted) and earlier.engine == event.engine for earlier in events[:place])
    }
    assert served_again == {0, 1}
    for trajectory in trained(trainer):
        models.check(trajectory)


def test_a_model_learns(servers: list[RealServer], model: Path, tmp_path: Path) -> None:
    async def repeat(letter: str, llm: LLM) -> float:
        answer = await llm.generate(f"{letter}:", max_new_tokens=4)
        return answer.text.count(letter) / 4

    letters = ALPHABET.removesuffix(":")
    pipeline = staleflow.Pipeline(
        tasks=ListTasks(letters),
        rollout=repeat,
        engines=[server.engine_at_version_0(model) for server in servers],
        trainer=staleflow.LocalTrainer(model, learning_rate=3e-3),
        config=Config(steps=60, batch_size=8, group_size=8, max_staleness=2),
        held_out=letters * 16,
        run_dir=tmp_path / "run",
        progress=False,
    )
    report = asyncio.run(pipeline.run())
    assert report.accounting.holds
    assert report.accuracy_before is not None
    assert report.accuracy_after is not None
    assert report.accuracy_before < 0.3
    assert report.accuracy_after > 0.8
    assert 0 < report.staleness_max <= 2
