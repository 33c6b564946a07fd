"""A kill must not give unfinished rollouts a second draw: what an engine has answered, a resumed run uses."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from resumed import check_history, killed, whole_checkpoints
from support import Parts, Scripted, ScriptedRun

from staleflow import LLM, Config, ListTasks, Report, Trajectory, checkpointing
from staleflow.checkpoints import open_checkpoint
from staleflow.coordinator import LeastLoad
from staleflow.events import Finished, Reused
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest, Generation, SyncMode

END = 0
"""The policy ends a conversation by saying this."""

CONFIG = Config(steps=16, batch_size=2, group_size=2, max_staleness=4, checkpoint_every_steps=1, max_failure_share=1.0)


async def conversation(task: int, llm: LLM) -> float:
    """Turns of a few tokens until the policy has had enough; the environment answers with what it was told."""
    completion = await llm.generate([100 + task], max_new_tokens=4)
    while END not in completion.token_ids:
        completion = await llm.generate(completion.token_ids[:1], max_new_tokens=4)
    return float(len(llm._trajectory.turns))


class Sampled(msgspec.Struct, frozen=True):
    """A token as an engine gave it; ``place`` is group, member and index in the trajectory."""

    place: tuple[int, int, int]
    token: int
    version: int


class Witness(ScriptedEngine):
    """Gives every token a logprob of its own, and writes down to whom it was given."""

    ids = itertools.count(1)

    def __init__(self, script: Callable[[GenerateRequest, random.Random], list[int]], seed: int) -> None:
        super().__init__(script, seed=seed, token_s=0.1)
        self.sampled: dict[float, Sampled] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        answer = await super().generate(request)
        group, member, *_ = map(int, request.request_id.split("."))
        logprobs = [-float(next(self.ids)) for _ in answer.token_ids]
        for index, logprob in enumerate(logprobs):
            place = (group, member, len(request.token_ids) + index)
            self.sampled[logprob] = Sampled(place, answer.token_ids[index], answer.versions[index])
        return msgspec.structs.replace(answer, logprobs=logprobs)


def says_what_it_always_says(request: GenerateRequest, _: random.Random) -> list[int]:
    """The same to the same member and context in every process."""
    member = request.request_id.split(".")[1]
    return chance(random.Random(f"{member}/{request.token_ids}"))


def says_anything(_: GenerateRequest, rng: random.Random) -> list[int]:
    """Something else in every request."""
    return chance(rng)


def rambles(request: GenerateRequest, rng: random.Random) -> list[int]:
    """As much as it may, in every request."""
    return [token for _ in range(request.max_new_tokens) for token in chance(rng)]


def chance(rng: random.Random) -> list[int]:
    return [END if rng.random() < 0.1 else rng.randint(1, 9)]


class Life:
    """One process of a run: what it resumed from, and what its engines and its trainer saw."""

    def __init__(self, run: ScriptedRun, resumed_from: Path | None) -> None:
        (engine,) = run.engines
        assert isinstance(engine, Witness)
        self.engine: Witness = engine
        self.trainer = run.trainer
        self.recorded = {} if resumed_from is None else recorded(resumed_from)


def recorded(folder: Path) -> dict[tuple[int, int, int], list[int]]:
    """What unfinished members had said at the newest checkpoint; by group, member and next attempt."""
    return {
        (group.id, said.member, group.attempts[said.member] + 1): said.token_ids
        for group in open_checkpoint(folder).cut.groups
        for said in group.playing
        if said.sampled_tokens
    }


def lives(
    scripted: Scripted,
    config: Config,
    folder: Path,
    script: Callable[[GenerateRequest, random.Random], list[int]],
    kills_s: Iterator[float],
    tasks: int,
    sync_mode: SyncMode = "keep",
) -> tuple[list[Life], ScriptedRun, Report]:
    """Kill a run again and again, until no time to be killed at is left; the tasks are all that its steps need."""
    resume = Parts()
    found: list[Life] = []
    for number in itertools.count():
        parts: Parts = {
            "tasks": ListTasks(range(tasks), seed=None, epochs=1),
            "rollout": conversation,
            "engines": [Witness(script, seed=number)],
            "trainer": ScriptedTrainer(step_s=0.05),
            "coordinator": LeastLoad(sync_mode=sync_mode),
            **resume,
        }
        run = scripted(config, **parts)
        found.append(Life(run, resume.get("resume")))
        remains = folder / f"killed-{number}"
        report = killed(run, next(kills_s, 1000.0), remains)
        if report is not None:
            return found, run, report
        resume = Parts(resume=remains) if whole_checkpoints(remains) else Parts()
    raise AssertionError("unreachable")


def trained(found: list[Life]) -> list[Trajectory]:
    """What was trained in the history that is left: a step that was lost with its process was made again."""
    by_step = {batch.step: batch for life in found for batch in life.trainer.batches}
    return [trajectory for step in sorted(by_step) for trajectory in by_step[step].trajectories]


@pytest.mark.parametrize("seed", range(4))
def test_L1_L2_L5_what_was_said_is_not_said_again(scripted: Scripted, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = msgspec.structs.replace(CONFIG, max_staleness=rng.randint(0, 4))
    kills_s = iter([rng.uniform(0.5, 3.0) for _ in range(8)])
    found, run, report = lives(scripted, config, tmp_path, says_what_it_always_says, kills_s, tasks=32)
    check_history(run.run_dir, config, report)
    reused = run.events_of(Reused)
    assert sum(event.tokens for event in reused) == report.reused_tokens
    # A synchronous run has no unfinished members between two steps.
    assert (report.reused_tokens > 0) == (config.max_staleness > 0)
    assert report.dropped_tokens == 0
    for life in found:
        for request in life.engine.requests:
            group, member, attempt, _ = map(int, request.request_id.split("."))
            known = life.recorded.get((group, member, attempt), [])
            assert request.token_ids[: len(known)] == known
    _, undisturbed, _ = lives(scripted, config, tmp_path / "undisturbed", says_what_it_always_says, iter([]), tasks=32)
    expected = {(t.task, t.member): t.token_ids for batch in undisturbed.trainer.batches for t in batch.trajectories}
    assert {(t.task, t.member): t.token_ids for t in trained(found)} == expected
    assert len(expected) == 64


@pytest.mark.parametrize("sync_mode", get_args(SyncMode))
def test_every_trained_token_is_as_an_engine_gave_it_and_trained_once(
    scripted: Scripted, tmp_path: Path, sync_mode: SyncMode
) -> None:
    """Also where weight updates interrupt requests, so that a call has several segments."""
    rng = random.Random(sync_mode)
    kills_s = iter([rng.uniform(0.5, 3.0) for _ in range(8)])
    found, run, report = lives(scripted, CONFIG, tmp_path, rambles, kills_s, tasks=32, sync_mode=sync_mode)
    check_history(run.run_dir, CONFIG, report)
    given = {logprob: sampled for life in found for logprob, sampled in life.engine.sampled.items()}
    used = set()
    trajectories = trained(found)
    assert len(trajectories) == len({(t.group, t.member) for t in trajectories}) == 64
    assert any(trajectory.attempt > 0 for trajectory in trajectories)
    several = any(len(t.turn(index)[1]) > 1 for t in trajectories for index in range(len(t.turns)))
    assert several == (sync_mode == "recompute")
    for trajectory in trajectories:
        index = 0
        for segment in trajectory.segments:
            for offset, logprob in enumerate(segment.logprobs):
                place = (trajectory.group, trajectory.member, index + offset)
                assert given[logprob] == Sampled(place, segment.token_ids[offset], segment.versions[offset])
                assert logprob not in used
                used.add(logprob)
            index += len(segment.token_ids)


def test_what_a_rollout_no_longer_asks_for_is_dropped_and_counted(scripted: Scripted, tmp_path: Path) -> None:
    """The environment is another one in every process: nothing but the first turn can be used."""

    def moody(mood: int) -> Parts:
        async def rollout(task: int, llm: LLM) -> float:
            completion = await llm.generate([100 + task], max_new_tokens=4)
            while END not in completion.token_ids:
                completion = await llm.generate([200 + mood], max_new_tokens=4)
            return 1.0

        return Parts(rollout=rollout, engines=[Witness(says_anything, seed=mood)])

    assert killed(scripted(CONFIG, **moody(0)), 3.0, tmp_path / "killed") is None
    said = [trajectory for group in open_checkpoint(tmp_path / "killed").cut.groups for trajectory in group.playing]
    resume: Parts = {"resume": tmp_path / "killed", **moody(1)}
    run = scripted(CONFIG, **resume)
    report = killed(run, 1000.0, tmp_path / "not-killed")
    assert report is not None
    check_history(run.run_dir, CONFIG, report)
    assert report.reused_tokens == sum(trajectory.sampled_tokens > 0 for trajectory in said)
    assert report.dropped_tokens == sum(max(0, trajectory.sampled_tokens - 1) for trajectory in said) > 0
    finished = {(event.group, event.member): event for event in run.events_of(Finished)}
    for event in run.events_of(Reused):
        assert finished[event.group, event.member].attempt == event.attempt


def test_killed_before_a_transcript_was_used_up_loses_none_of_it(scripted: Scripted, tmp_path: Path) -> None:
    """Every turn takes the environment long, so no process plays again all that the one before had played."""

    async def slow(task: int, llm: LLM) -> float:
        for turn in range(20):
            await asyncio.sleep(0.0 if turn < calls else pause_s)
            await llm.generate([100 + task], max_new_tokens=4)
        return 1.0

    calls, pause_s, resume = 20, 0.0, Parts()
    for life in range(4):
        parts: Parts = {"rollout": slow, "engines": [Witness(says_anything, seed=life)], **resume}
        run = scripted(CONFIG, **parts)
        assert killed(run, 3.0, tmp_path / f"killed-{life}") is None
        before = recorded(resume["resume"]) if resume else {}
        resume = Parts(resume=tmp_path / f"killed-{life}")
        after = {(group, member): said for (group, member, _), said in recorded(resume["resume"]).items()}
        for (group, member, _), said in before.items():
            assert after.get((group, member), said)[: len(said)] == said
        calls, pause_s = 2, 2.0
    assert before


@pytest.mark.parametrize(("transcripts", "least", "most"), [("kept", 8.5, 11.5), ("lost", 0.0, 8.0)])
def test_B1_lengths_are_those_of_a_run_that_is_never_killed(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transcripts: str, least: float, most: float
) -> None:
    """A tenth of all turns is a last one, so ten is the mean. Played from the start until they are short enough to fit
    into the life of a process, rollouts would seem shorter."""
    config = Config(steps=300, batch_size=1, group_size=1, max_staleness=100, checkpoint_every_steps=5)
    if transcripts == "lost":
        nothing = partial(msgspec.structs.replace, segments=[], turns=[])
        monkeypatch.setattr(checkpointing, "revive_trajectory", lambda said, _: nothing(said))
    rng = random.Random(0)
    kills_s = (rng.uniform(1.0, 2.0) for _ in range(40))
    found, _, _ = lives(scripted, config, tmp_path, says_anything, kills_s, tasks=300)
    assert len(found) > 10
    turns = [len(trajectory.turns) for trajectory in trained(found)]
    assert len(turns) == 300
    assert least < sum(turns) / len(turns) < most
