"""Ctrl-C in a run that saves checkpoints: it goes on from that moment, as after a kill at best."""

import asyncio
import errno
import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from resumed import check_history, killed, whole_checkpoints
from support import Parts, Scripted, ScriptedRun, one_turn, virtually

from staleflow import LLM, Config, Report, StragglerPolicy, checkpoints, uniform_rewards
from staleflow.checkpoints import open_checkpoint
from staleflow.errors import TrainerError
from staleflow.events import Answered, CheckpointBegan, CheckpointSaved, Consumed, Published, Released
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest, Generation, StepMetrics, TrainBatch

SELDOM = 1000
"""No checkpoint is due before the end of the run."""

CONFIG = Config(steps=12, batch_size=2, group_size=2, max_staleness=2, checkpoint_every_steps=SELDOM)


async def three_turns(task: int, llm: LLM) -> float:
    rewards = [await one_turn(task, llm) for _ in range(3)]
    return rewards[-1]


def interrupted(run: ScriptedRun, *times_s: float) -> tuple[Report | None, float]:
    """Interrupt a run at these times; returns the report of one that had ended before, and when it ended."""

    async def main() -> tuple[Report | None, float]:
        life = asyncio.create_task(run.pipeline.run())
        now_s = 0.0
        for at_s in times_s:
            done, _ = await asyncio.wait({life}, timeout=at_s - now_s)
            if done:
                return life.result(), now_s
            life.cancel()
            now_s = at_s
        with pytest.raises(asyncio.CancelledError):
            await life
        return None, asyncio.get_running_loop().time()

    return virtually(main())


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_at_any_moment(scripted: Scripted, tmp_path: Path, seed: int) -> None:
    """Interrupted or killed, again and again: the laws hold, and an interrupt alone loses no step."""
    rng = random.Random(seed)
    config = msgspec.structs.replace(
        CONFIG,
        batch_size=rng.randint(1, 2),
        max_staleness=rng.randint(0, 3),
        extra_members=rng.choice([0, 1]),
        extra_groups=rng.choice([0, 1]),
        stragglers=rng.choice([None, StragglerPolicy(action="truncate", patience_s=0.2)]),
        evaluate_every_steps=rng.choice([None, 3]),
    )
    kills = rng.choice([0.0, 0.4])
    resume, steps = Parts(), list[int]()
    for life in itertools.count():
        parts: Parts = {
            "rollout": three_turns,
            "group_filter": rng.choice([None, uniform_rewards]),
            "engines": [ScriptedEngine(seed=rng.randrange(99), token_s=0.05) for _ in range(rng.randint(1, 2))],
            "trainer": ScriptedTrainer(step_s=rng.choice([0.05, 0.3]), save_s=rng.choice([0.0, 0.2])),
            "held_out": range(3),
            **resume,
        }
        run = scripted(config, **parts)
        at_s = rng.uniform(0.5, 3.0) if life < 6 else 1000.0
        if rng.random() < kills:
            remains = tmp_path / f"killed-{life}"
            report = killed(run, at_s, remains)
        else:
            remains = run.run_dir
            report, _ = interrupted(run, at_s)
            steps += [batch.step for batch in run.trainer.batches]
        if report is not None:
            break
        resume = Parts(resume=remains) if whole_checkpoints(remains) else Parts()
    assert report is not None
    check_history(run.run_dir, config, report)
    if kills == 0.0:
        assert steps[-config.steps :] == list(range(config.steps))


@pytest.mark.parametrize("after_s", [1.0 + 0.037 * n for n in range(16)])
def test_checkpoint_is_of_that_moment_or_of_the_end_of_the_step(scripted: Scripted, after_s: float) -> None:
    run = scripted(CONFIG, rollout=three_turns, engines=[ScriptedEngine(token_s=0.05)])
    interrupted(run, after_s)
    run.check_wound_down()
    events = run.events()
    saving = next(index for index, event in enumerate(events) if isinstance(event, CheckpointBegan))
    before = [event for event in events[:saving] if event.t <= after_s]
    in_step = sum(isinstance(event, Consumed) for event in before) > sum(isinstance(e, Published) for e in before)
    saved_s = events[saving].t
    assert saved_s > after_s if in_step else saved_s == pytest.approx(after_s)
    assert not any(isinstance(event, Released) for event in events)
    cut = open_checkpoint(run.run_dir).cut
    assert cut.step == sum(isinstance(event, Published) for event in events[:saving])
    said = {(t.group, t.member, t.attempt): t for group in cut.groups for t in group.playing}
    heard = [event for event in events[:saving] if isinstance(event, Answered)]
    for key, trajectory in said.items():
        own = [event.tokens for event in heard if tuple(map(int, event.request.split(".")[:3])) == key]
        assert sum(own) == trajectory.sampled_tokens


def test_older_checkpoint_of_the_same_step_is_replaced(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while the trainer waits for its first batch after a checkpoint; killed at any moment of the save."""

    class Slows(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            if self.version == 3:
                await asyncio.sleep(100.0)
            return await super().generate(request)

    config = msgspec.structs.replace(CONFIG, steps=5, checkpoint_every_steps=3, keep_checkpoints=1, max_staleness=0)
    run = scripted(config, rollout=three_turns, engines=[Slows()])
    remains: list[Path] = []

    def copy_then(operation: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*arguments: Any, **options: Any) -> Any:
            if whole_checkpoints(run.run_dir) or remains:
                remains.append(tmp_path / f"killed-{len(remains)}")
                shutil.copytree(run.run_dir, remains[-1])
            return operation(*arguments, **options)

        return copied

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_sync", copy_then(checkpoints._sync))
        patched.setattr(Path, "rename", copy_then(Path.rename))
        patched.setattr(shutil, "rmtree", copy_then(shutil.rmtree))
        interrupted(run, 100.0)
    assert [path.name for path in (run.run_dir / "checkpoints").iterdir()] == ["3"]
    assert [event.step for event in run.events_of(CheckpointSaved)] == [3, 3]
    groups = set()
    for killed_there in (*remains, run.run_dir):
        found = open_checkpoint(killed_there)
        groups.add(len(found.cut.groups))
        resumed = scripted(config, resume=killed_there, rollout=three_turns)
        check_history(resumed.run_dir, config, virtually(resumed.pipeline.run()))
        assert not [path for path in (killed_there / "checkpoints").iterdir() if not path.name.isdecimal()]
    assert groups == {0, 2}, "of right after the step, and of the interrupt"


def test_second_interrupt_saves_nothing(scripted: Scripted) -> None:
    run = scripted(CONFIG, trainer=ScriptedTrainer(step_s=10.0))
    _, ended_s = interrupted(run, 15.0, 16.0)
    assert ended_s == pytest.approx(16.0)
    assert run.trainer.saved == []
    assert whole_checkpoints(run.run_dir) == []
    assert len(run.events_of(Released)) == 1
    run.check_wound_down()


def test_trainer_that_hangs_is_not_waited_for(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    class Hangs(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepMetrics:
            if batch.step == 3:
                await asyncio.Event().wait()
            return await super().step(batch)

    run = scripted(CONFIG, trainer=Hangs())
    _, ended_s = interrupted(run, 20.0)
    assert ended_s == pytest.approx(140.0)
    assert "no checkpoint of this moment could be saved: TimeoutError" in caplog.text
    run.check_wound_down()


@pytest.mark.parametrize("after_s", [0.1, 0.3], ids=["in a step", "between steps"])
def test_full_disk_leaves_the_older_checkpoint_and_is_said(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, after_s: float
) -> None:
    def full_disk(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    class FillsTheDisk(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepMetrics:
            if batch.step == 5:
                monkeypatch.setattr(checkpoints, "_describe", full_disk)
                full.set()
            return await super().step(batch)

    config = msgspec.structs.replace(CONFIG, checkpoint_every_steps=4)
    run = scripted(config, trainer=FillsTheDisk(), engines=[ScriptedEngine(token_s=0.1)])
    full = asyncio.Event()

    async def main() -> None:
        life = asyncio.create_task(run.pipeline.run())
        await full.wait()
        await asyncio.sleep(after_s)
        life.cancel()
        await life

    with pytest.raises(asyncio.CancelledError):
        virtually(main())
    assert "no checkpoint of this moment could be saved: cannot write" in caplog.text
    monkeypatch.undo()
    assert whole_checkpoints(run.run_dir) == [4]
    resumed = scripted(config, resume=run.run_dir)
    check_history(run.run_dir, config, virtually(resumed.pipeline.run()))


@pytest.mark.parametrize("fails", ["before", "meanwhile"])
def test_run_in_which_something_failed_is_not_saved(scripted: Scripted, fails: str) -> None:
    class Dies(ScriptedTrainer):
        async def run(self) -> None:
            await asyncio.sleep(2.0)
            raise TrainerError("died")

    run = scripted(CONFIG, trainer=Dies(step_s=1.5))

    async def main() -> None:
        life = asyncio.create_task(run.pipeline.run())
        if fails == "meanwhile":
            await asyncio.sleep(1.95)
            life.cancel()
        await life

    with pytest.raises(TrainerError, match="died"):
        virtually(main())
    assert whole_checkpoints(run.run_dir) == []
    run.check_wound_down()


def test_trainer_that_fails_in_its_last_step_is_the_error(scripted: Scripted) -> None:
    class Fails(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepMetrics:
            await super().step(batch)
            raise TrainerError("out of memory")

    run = scripted(CONFIG, trainer=Fails(step_s=5.0))

    async def main() -> None:
        life = asyncio.create_task(run.pipeline.run())
        await asyncio.sleep(3.0)
        life.cancel()
        await life

    with pytest.raises(TrainerError, match="out of memory"):
        virtually(main())
    run.check_wound_down()


@pytest.mark.parametrize("after_s", [0.02, 60.0])
def test_before_the_first_step_and_after_the_last_nothing_more_is_saved(scripted: Scripted, after_s: float) -> None:
    class Lingers(ScriptedTrainer):
        async def save(self, folder: Path) -> None:
            await asyncio.sleep(100.0 if folder.name == "checkpoint" and not self.saved else 0.0)
            await super().save(folder)

    run = scripted(CONFIG, trainer=Lingers())
    interrupted(run, after_s)
    assert whole_checkpoints(run.run_dir) == ([] if after_s < 1.0 else [12])
    run.check_wound_down()
