"""A run is killed at any moment, again and again, and resumed: its history is as if nothing had happened."""

import asyncio
import itertools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec
import pytest
from resumed import check_history, killed, whole_checkpoints
from support import Parts, Scripted, ScriptedRun, one_turn, virtually
from turbulence import Mortal, Restless

from staleflow import LLM, Config, Report, StalenessLedger, StragglerPolicy, Trajectory, checkpoints, uniform_rewards
from staleflow.checkpoints import open_checkpoint
from staleflow.events import Admitted, Consumed, Evaluated, Event, Finished, Requested, Resumed, Synced
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest, Generation

KILLS = 6


async def often_fails(task: int, llm: LLM) -> float:
    reward = await one_turn(task, llm)
    if reward == 0:
        raise ValueError("no answer")
    return reward


def random_config(rng: random.Random) -> Config:
    return Config(
        steps=10,
        batch_size=rng.randint(1, 3),
        group_size=rng.randint(1, 3),
        max_staleness=rng.randint(0, 3),
        extra_groups=rng.choice([0, 0, 1]),
        extra_members=rng.choice([0, 0, 1]),
        stragglers=rng.choice([None, None, StragglerPolicy(action="close_short", patience_s=0.2)]),
        max_failure_share=1.0,
        max_attempts=2,
        evaluate_every_steps=rng.choice([None, 3]),
        checkpoint_every_steps=rng.randint(1, 3),
    )


def random_parts(rng: random.Random) -> Parts:
    """The parts of one process: how many engines there are and how fast they are, chance decides anew."""
    return Parts(
        engines=[
            ScriptedEngine(seed=rng.randrange(10**6), token_s=rng.choice([0.01, 0.05]), update_s=rng.choice([0.0, 0.3]))
            for _ in range(rng.randint(1, 3))
        ],
        trainer=ScriptedTrainer(step_s=0.3, save_s=rng.choice([0.0, 0.4])),
        held_out=range(4),
    )


def lives(
    scripted: Scripted, config: Config, folder: Path, rng: random.Random, kind: Parts
) -> tuple[ScriptedRun, Report]:
    """Kill a run at random moments, resume what is left, and let it come to its end after that."""
    resume = Parts()
    for life in itertools.count():
        parts: Parts = {**random_parts(rng), **kind, **resume}
        run = scripted(config, **parts)
        remains = folder / f"killed-{life}"
        report = killed(run, rng.uniform(0.0, 3.0) if life < KILLS else 1000.0, remains)
        if report is not None:
            return run, report
        # A process that was killed before its first checkpoint has to begin anew.
        resume = Parts(resume=remains) if whole_checkpoints(remains) else Parts()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("seed", range(24))
def test_L1_L2_L5_no_task_is_skipped_and_none_trained_twice(scripted: Scripted, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = random_config(rng)
    drops = rng.choice([None, uniform_rewards if config.group_size > 1 else None])
    kind = Parts(rollout=rng.choice([one_turn, often_fails]), group_filter=drops)
    run, report = lives(scripted, config, tmp_path, rng, kind)
    assert report.steps == config.steps
    check_history(run.run_dir, config, report)
    assert run.trainer.steps == config.steps


def test_killed_at_any_moment_of_a_save(scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the rename the older checkpoint counts, after it the newer one; there is always one to go on from."""
    config = Config(steps=6, batch_size=2, group_size=2, checkpoint_every_steps=2, keep_checkpoints=1)
    run = scripted(config)
    remains: list[Path] = []

    def copy_then(operation: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*arguments: Any, **options: Any) -> Any:
            remains.append(tmp_path / f"killed-{len(remains)}")
            shutil.copytree(run.run_dir, remains[-1])
            return operation(*arguments, **options)

        return copied

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_sync", copy_then(checkpoints._sync))
        patched.setattr(checkpoints, "_describe", copy_then(checkpoints._describe))
        patched.setattr(Path, "rename", copy_then(Path.rename))
        run.run()
    assert len(remains) > 30
    seen = set()
    for killed_there in remains:
        if whole_checkpoints(killed_there):
            resumed = scripted(config, resume=killed_there)
            seen.add(open_checkpoint(killed_there).cut.step)
            check_history(resumed.run_dir, config, virtually(resumed.pipeline.run()))
            assert list(killed_there.rglob("*.partial")) == []
    assert seen == {2, 4, 6}


def stopped(scripted: Scripted, config: Config, folder: Path, at_s: float, **parts: Unpack[Parts]) -> Path:
    """What a run leaves that is killed at a time."""
    assert killed(scripted(config, **parts), at_s, folder / "killed") is None
    return folder / "killed"


def after_resume(events: list[Event]) -> list[Event]:
    return list(itertools.dropwhile(lambda event: not isinstance(event, Resumed), events))


CONFIG = Config(steps=12, batch_size=2, group_size=2, max_staleness=2, checkpoint_every_steps=3)


def test_V3_first_step_after_resume_is_saved_plus_one(scripted: Scripted, tmp_path: Path) -> None:
    remains = stopped(scripted, CONFIG, tmp_path, 2.0)
    saved = open_checkpoint(remains).cut.step
    run = scripted(CONFIG, resume=remains)
    report = virtually(run.pipeline.run())
    check_history(run.run_dir, CONFIG, report)
    assert [batch.step for batch in run.trainer.batches] == list(range(saved, CONFIG.steps))
    metrics = [json.loads(line)["step"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert metrics == list(range(CONFIG.steps))
    assert report.trained_trajectories == CONFIG.steps * CONFIG.batch_size * CONFIG.group_size


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_V1_counters_and_capacity_are_those_of_the_cut(scripted: Scripted, tmp_path: Path, max_staleness: int) -> None:
    config = msgspec.structs.replace(CONFIG, steps=30, max_staleness=max_staleness)
    remains = stopped(scripted, config, tmp_path, 5.0, engines=[ScriptedEngine(token_s=0.1)])
    cut = open_checkpoint(remains).cut
    journal = (remains / "ledger.journal").read_bytes()[: cut.history.journal_bytes]
    before = StalenessLedger.replay(journal)
    assert len(list(before)) > 0
    ledger = open_checkpoint(remains).ledger(config)
    assert ledger.statistics() == before.ledger.statistics()
    assert [ledger.capacity(version) for version in range(cut.step + 1)] == [
        before.ledger.capacity(version) for version in range(cut.step + 1)
    ]
    assert {group.id for group in cut.groups if group.complete} | set(ledger.blockers()) <= {g.id for g in cut.groups}
    assert len(cut.groups) == ledger.statistics().running + ledger.statistics().complete


def test_L6_group_that_was_dropped_is_done(scripted: Scripted, tmp_path: Path) -> None:
    """The first task, filtered out, holds the cursor back as little as any other."""

    def drop_first(group: Sequence[Trajectory]) -> str | None:
        return "stale" if group[0].task == 0 else None

    remains = stopped(scripted, CONFIG, tmp_path, 2.0, group_filter=drop_first)
    cut = open_checkpoint(remains).cut
    assert cut.cursor >= cut.step * CONFIG.batch_size + 1
    run = scripted(CONFIG, resume=remains, group_filter=drop_first)
    report = virtually(run.pipeline.run())
    check_history(run.run_dir, CONFIG, report)
    assert report.accounting.filtered == {"stale": 1}
    admitted = [event.task for event in after_resume(run.events()) if isinstance(event, Admitted)]
    assert admitted[0] == cut.cursor


def test_H4_straggler_of_a_killed_run_is_another_attempt(scripted: Scripted, tmp_path: Path) -> None:
    """What held the step up is not drawn again: same task and group, but the dice of another attempt."""

    class Straggles(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            if request.request_id.startswith("9.1.0."):
                await asyncio.sleep(1000.0)
            return await super().generate(request)

    remains = stopped(scripted, CONFIG, tmp_path, 100.0, engines=[Straggles()])
    (group,) = [group for group in open_checkpoint(remains).cut.groups if group.id == 9]
    assert 1 in [trajectory.member for trajectory in group.playing]
    run = scripted(CONFIG, resume=remains, engines=[Straggles()])
    report = virtually(run.pipeline.run())
    check_history(run.run_dir, CONFIG, report)
    (finished,) = [event for event in run.events_of(Finished) if (event.group, event.member) == (9, 1)]
    assert finished.attempt == 1
    assert report.accounting.aborted == {}


def test_being_killed_is_no_failure_of_the_rollout(scripted: Scripted, tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, max_attempts=1, max_staleness=4)
    slow = [ScriptedEngine(token_s=1.0)]
    remains = stopped(scripted, config, tmp_path, 15.0, engines=slow)
    for life in range(3):
        run = scripted(config, resume=remains, engines=[ScriptedEngine(token_s=1.0)])
        remains = tmp_path / f"again-{life}"
        assert killed(run, 2.0, remains) is None
    run = scripted(config, resume=remains)
    report = virtually(run.pipeline.run())
    check_history(run.run_dir, config, report)
    assert (report.accounting.aborted, report.accounting.failed_attempts) == ({}, {})
    assert max(event.attempt for event in run.events_of(Finished)) > 0


def test_every_engine_has_the_weights_before_anything_is_asked_of_it(scripted: Scripted, tmp_path: Path) -> None:
    remains = stopped(scripted, CONFIG, tmp_path, 2.0)
    saved = open_checkpoint(remains).cut.step
    run = scripted(CONFIG, resume=remains, engines=[ScriptedEngine(), ScriptedEngine(update_s=5.0)])
    report = virtually(run.pipeline.run())
    check_history(run.run_dir, CONFIG, report)
    events = after_resume(run.events())
    first = next(index for index, event in enumerate(events) if isinstance(event, Requested | Admitted))
    synced = [(event.engine, event.version) for event in events[:first] if isinstance(event, Synced)]
    assert sorted(synced) == [(0, saved), (1, saved)]
    consumed = next(event for event in events if isinstance(event, Consumed))
    assert consumed.batch == saved


def test_report_is_of_the_whole_run(scripted: Scripted, tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, max_failure_share=1.0, max_attempts=9, evaluate_every_steps=3)
    remains = stopped(scripted, config, tmp_path, 2.0, rollout=often_fails, held_out=range(4))
    cut = open_checkpoint(remains).cut
    run = scripted(config, resume=remains, rollout=often_fails, held_out=range(4))
    report = virtually(run.pipeline.run())
    assert report.accounting.failed_attempts["ValueError"] > cut.failed_attempts["ValueError"] > 0
    evaluated = [event.step for event in run.events_of(Evaluated)]
    assert evaluated == [0, 3, 6, 9, 12]
    assert report.accuracy_before == run.events_of(Evaluated)[0].reward
    times = [event.t for event in run.events()]
    assert times == sorted(times)
    assert report.wall_s == pytest.approx(times[-1])


@pytest.mark.parametrize("seed", range(12))
def test_what_has_happened_to_engines_counts_through_a_resume(scripted: Scripted, tmp_path: Path, seed: int) -> None:
    config = msgspec.structs.replace(CONFIG, steps=50, engine_restarts=1000, rollout_timeout_s=60.0)

    def parts(life: int) -> Parts:
        engines = [Mortal(100 * seed + 10 * life + index, mean_life_s=1.0) for index in range(2)]
        return Parts(engines=engines, coordinator=Restless(100 * seed + life), trainer=ScriptedTrainer(step_s=0.3))

    remains = stopped(scripted, config, tmp_path, 10.0, **parts(0))
    before = open_checkpoint(remains).cut.fleet
    second: Parts = {**parts(1), "resume": remains}
    resumed = scripted(config, **second)
    report = virtually(resumed.pipeline.run())
    check_history(resumed.run_dir, config, report)
    assert report.fleet.deaths > before.deaths > 0
    assert report.fleet.interrupted.keys() >= before.interrupted.keys()
    assert report.fleet.discarded_tokens >= before.discarded_tokens
