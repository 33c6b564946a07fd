"""Checkpoints on disk: what is in them, what they survive, and what is refused."""

import asyncio
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from resumed import check_history, killed, whole_checkpoints
from support import Scripted, one_turn, virtually

from staleflow import LLM, Config, ListTasks, Pipeline, ResumableTaskSource, Task, checkpoints
from staleflow.checkpoints import open_checkpoint
from staleflow.errors import CheckpointError, ConfigError, RunFolderError, TaskSourceError, TrainerError
from staleflow.events import CheckpointBegan, CheckpointSaved, Resumed
from staleflow.testing import ScriptedEngine, ScriptedTrainer

CONFIG = Config(steps=8, batch_size=2, group_size=2, checkpoint_every_steps=2)


@pytest.fixture
def run_dir(scripted: Scripted, tmp_path: Path) -> Path:
    """A run that was killed when it had two checkpoints."""
    assert killed(scripted(CONFIG, engines=[ScriptedEngine(token_s=0.05)]), 1.5, tmp_path / "killed") is None
    assert whole_checkpoints(tmp_path / "killed") == [2, 4]
    return tmp_path / "killed"


# -- what is kept ------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_the_best(scripted: Scripted) -> None:
    rewards = {0: 0.0, 2: 1.0, 4: 3.0, 6: 2.0, 8: 1.0}

    async def rollout(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        return reward if task >= 0 else rewards[min(llm._trajectory.attempt, 8)]

    config = msgspec.structs.replace(CONFIG, steps=12, keep_checkpoints=1, evaluate_every_steps=2)
    rewards |= {10: 0.0, 12: 0.0}
    run = scripted(config, rollout=rollout, held_out=[-1])
    run.run()
    assert whole_checkpoints(run.run_dir) == [4, 12]


def test_without_evaluations_only_the_newest_are_kept(scripted: Scripted) -> None:
    run = scripted(CONFIG)
    run.run()
    assert whole_checkpoints(run.run_dir) == [6, 8]
    assert [event.step for event in run.events_of(CheckpointSaved)] == [2, 4, 6, 8]
    assert (run.run_dir / "checkpoints" / "8" / "trainer" / "first").read_text() == "8"


def test_last_step_is_saved_though_it_is_not_due(scripted: Scripted) -> None:
    run = scripted(msgspec.structs.replace(CONFIG, steps=7, checkpoint_every_steps=5))
    run.run()
    assert whole_checkpoints(run.run_dir) == [5, 7]


def test_without_the_setting_nothing_is_saved(scripted: Scripted) -> None:
    run = scripted(msgspec.structs.replace(CONFIG, checkpoint_every_steps=None))
    run.run()
    assert not (run.run_dir / "checkpoints").exists()
    assert run.events_of(CheckpointBegan) == []


def test_finished_run_goes_on_with_more_steps(scripted: Scripted) -> None:
    first = scripted(CONFIG)
    first.run()
    longer = msgspec.structs.replace(CONFIG, steps=11)
    run = scripted(longer, resume=first.run_dir)
    check_history(run.run_dir, longer, virtually(run.pipeline.run()))
    assert [batch.step for batch in run.trainer.batches] == [8, 9, 10]


def test_finished_run_has_nothing_left_to_do(scripted: Scripted) -> None:
    first = scripted(CONFIG)
    first.run()
    run = scripted(CONFIG, resume=first.run_dir)
    check_history(run.run_dir, CONFIG, virtually(run.pipeline.run()))
    assert run.trainer.batches == []


def test_older_checkpoint_goes_on_and_what_came_after_is_forgotten(scripted: Scripted, run_dir: Path) -> None:
    (run_dir / "checkpoints" / "6.partial").mkdir()
    run = scripted(msgspec.structs.replace(CONFIG, steps=3), resume=run_dir / "checkpoints" / "2")
    report = virtually(run.pipeline.run())
    check_history(run_dir, run.config, report)
    assert [event.step for event in run.events_of(Resumed)] == [2]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["2", "3"]


# -- faults while saving -----------------------------------------------------------------------------------------


def full_disk(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["_describe", "_sync"])
def test_disk_full_while_saving_leaves_the_older_checkpoint_whole(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class FillsTheDisk(ScriptedTrainer):
        async def step(self, batch: Any) -> Any:
            if batch.step == 3:
                monkeypatch.setattr(checkpoints, where, full_disk)
            return await super().step(batch)

    run = scripted(CONFIG, trainer=FillsTheDisk())
    assert "No space left on device" in str(run.fail(CheckpointError))
    monkeypatch.undo()
    check_older_goes_on(scripted, run.run_dir)


def test_disk_full_while_the_trainer_saves_leaves_the_older_checkpoint_whole(scripted: Scripted) -> None:
    class FindsTheDiskFull(ScriptedTrainer):
        async def save_state(self, folder: Path) -> None:
            await super().save_state(folder)
            if self.steps == 4:
                raise TrainerError("the trainer could not write: No space left on device")

    run = scripted(CONFIG, trainer=FindsTheDiskFull())
    run.fail(TrainerError)
    check_older_goes_on(scripted, run.run_dir)


@pytest.mark.parametrize("after_s", [0.05 * n for n in range(8)])
def test_terminated_twice_while_saving_leaves_the_older_checkpoint_whole(scripted: Scripted, after_s: float) -> None:
    saving = asyncio.Event()

    class SavesSlowly(ScriptedTrainer):
        async def save_state(self, folder: Path) -> None:
            if self.steps == 4:
                saving.set()
            await super().save_state(folder)

    run = scripted(CONFIG, trainer=SavesSlowly(save_s=0.4))

    async def terminated() -> None:
        life = asyncio.ensure_future(run.pipeline.run())
        await saving.wait()
        await asyncio.sleep(after_s)
        for _ in range(2):
            life.cancel()
            await asyncio.sleep(0)
        await life

    with pytest.raises(asyncio.CancelledError):
        virtually(terminated())
    run.check_wound_down()
    assert run.run_dir / "checkpoint" not in run.trainer.saved
    check_older_goes_on(scripted, run.run_dir)


def check_older_goes_on(scripted: Scripted, run_dir: Path) -> None:
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["2"]
    resumed = scripted(CONFIG, resume=run_dir)
    check_history(run_dir, CONFIG, virtually(resumed.pipeline.run()))
    assert resumed.trainer.batches[0].step == 2


# -- what cannot be resumed --------------------------------------------------------------------------------------


def test_every_damage_to_every_file_is_named(run_dir: Path) -> None:
    folder = run_dir / "checkpoints" / "4"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["controller.msgpack", "manifest.json", "trainer/first", "trainer/second"]
    for name in names:
        whole = (folder / name).read_bytes()
        for damage in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"", None):
            (folder / name).unlink()
            if damage is not None:
                (folder / name).write_bytes(damage)
            if name != "manifest.json" or damage in (None, b""):
                with pytest.raises(CheckpointError, match=r"damaged|no manifest|no checkpoint") as error:
                    open_checkpoint(folder)
                assert name in str(error.value) or damage is None
            (folder / name).write_bytes(whole)
    assert open_checkpoint(run_dir).cut.step == 4


def test_what_is_no_checkpoint_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty holds no checkpoint: .*checkpoint_every_steps"):
        open_checkpoint(tmp_path / "empty")
    manifest = run_dir / "checkpoints" / "4" / "manifest.json"
    manifest.write_text(json.dumps({"weights": "elsewhere"}))
    with pytest.raises(CheckpointError, match=r"manifest.json is no manifest of a checkpoint"):
        open_checkpoint(run_dir)
    manifest.write_text(json.dumps({"staleflow_checkpoint": 1}))
    with pytest.raises(CheckpointError, match=r"4 is of format 1; this version reads format 2"):
        open_checkpoint(run_dir)
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoints/4 holds no checkpoint"):
        open_checkpoint(manifest.parent)


def test_checkpoint_under_another_name_is_refused(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "4").rename(run_dir / "checkpoints" / "7")
    with pytest.raises(CheckpointError, match=r"checkpoints/7 is that of step 4: rename its folder back"):
        open_checkpoint(run_dir)


def test_history_that_is_too_short_is_named(scripted: Scripted, run_dir: Path) -> None:
    events = run_dir / "events.jsonl"
    events.write_bytes(events.read_bytes()[:100])
    with pytest.raises(RunFolderError, match=r"events.jsonl is shorter than when the checkpoint was saved"):
        virtually(scripted(CONFIG, resume=run_dir).pipeline.run())


def test_run_that_still_goes_on_is_not_resumed(scripted: Scripted) -> None:
    run = scripted(CONFIG)

    async def both() -> None:
        life = asyncio.ensure_future(run.pipeline.run())
        await asyncio.sleep(1.5)
        with pytest.raises(RunFolderError, match="belongs to a run that still goes on"):
            await scripted(CONFIG, resume=run.run_dir).pipeline.run()
        await life

    virtually(both())
    run.replay()


@pytest.mark.parametrize("name", ["batch_size", "max_staleness", "group_size", "extra_groups", "extra_members"])
def test_settings_of_the_ledger_cannot_change(run_dir: Path, name: str) -> None:
    saved = getattr(CONFIG, name)
    with pytest.raises(ConfigError, match=rf"{name} is {saved + 1}; it must stay {saved}"):
        open_checkpoint(run_dir).ledger(msgspec.structs.replace(CONFIG, **{name: saved + 1}))


def test_other_settings_can_change(scripted: Scripted, run_dir: Path) -> None:
    config = msgspec.structs.replace(
        CONFIG, steps=9, max_attempts=1, rollout_timeout_s=7.0, checkpoint_every_steps=None, max_failure_share=0.1
    )
    run = scripted(config, resume=run_dir, engines=[ScriptedEngine(), ScriptedEngine()])
    check_history(run_dir, config, virtually(run.pipeline.run()))
    assert json.loads((run_dir / "config.json").read_text())["config"]["steps"] == 9


def test_resumed_run_goes_on_in_its_folder_wherever_that_is(scripted: Scripted, run_dir: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run_dir, moved)
    with pytest.raises(ConfigError, match=rf"run_dir is 'elsewhere'; the run that is resumed goes on in {moved}"):
        Pipeline(
            tasks=ListTasks([1]),
            rollout=one_turn,
            engines=[ScriptedEngine()],
            trainer=ScriptedTrainer(),
            config=CONFIG,
            resume=moved / "checkpoints" / "2",
            run_dir="elsewhere",
        )
    run = scripted(CONFIG, resume=moved)
    assert run.run_dir == moved
    check_history(moved, CONFIG, virtually(run.pipeline.run()))


# -- tasks -------------------------------------------------------------------------------------------------------


class Problem(msgspec.Struct):
    question: str
    answers: set[str]


class Opaque:
    pass


class Numbers:
    """A source without a cursor."""

    async def next(self) -> Task[int] | None:
        return None


def test_tasks_come_back_with_their_types(scripted: Scripted, tmp_path: Path) -> None:
    async def rollout(problem: Any, llm: LLM) -> float:
        assert isinstance(problem, Problem)
        await llm.generate([len(problem.question)], max_new_tokens=8)
        return float("yes" in problem.answers)

    def problems() -> Any:
        return ListTasks([Problem("?" * n, {"yes", "no", "perhaps", str(n)}) for n in range(1, 9)])

    engines = [ScriptedEngine(token_s=0.05)]
    run = scripted(CONFIG, tasks=problems(), rollout=rollout, engines=engines)
    assert killed(run, 2.0, tmp_path / "killed") is None
    resumed = scripted(CONFIG, tasks=problems(), rollout=rollout, resume=tmp_path / "killed")
    check_history(resumed.run_dir, CONFIG, virtually(resumed.pipeline.run()))


def test_source_that_ends_is_exhausted_once(scripted: Scripted, tmp_path: Path) -> None:
    def tasks() -> ListTasks[int]:
        return ListTasks(range(13), epochs=1)

    config = msgspec.structs.replace(CONFIG, steps=100)
    assert killed(scripted(config, tasks=tasks(), engines=[ScriptedEngine(token_s=0.1)]), 2.0, tmp_path / "run") is None
    run = scripted(config, tasks=tasks(), resume=tmp_path / "run")
    report = virtually(run.pipeline.run())
    assert (report.ended, report.steps) == ("source_exhausted", 6)
    check_history(run.run_dir, config, report)


def test_task_that_cannot_be_saved_is_named_at_the_first_checkpoint(scripted: Scripted) -> None:
    async def rollout(task: Any, llm: LLM) -> float:
        return await one_turn(1, llm)

    tasks: Any = ListTasks([Opaque()])
    error = scripted(CONFIG, tasks=tasks, rollout=rollout, engines=[ScriptedEngine(token_s=0.1)]).fail(CheckpointError)
    assert "its data is a Opaque, and must be made of what msgspec can encode" in str(error)


def test_other_tasks_than_before_are_named(scripted: Scripted, run_dir: Path) -> None:
    live = [group.task for group in open_checkpoint(run_dir).cut.groups]
    assert live
    run = scripted(CONFIG, resume=run_dir, tasks=ListTasks(range(1, 1001), seed=None))
    with pytest.raises(CheckpointError, match=rf"task {live[0]} is not what it was when the checkpoint was saved"):
        virtually(run.pipeline.run())
    fewer = scripted(CONFIG, resume=run_dir, tasks=ListTasks(range(3), seed=None, epochs=1))
    with pytest.raises(TaskSourceError, match=rf"asked for task {live[0]} again and handed out none"):
        virtually(fewer.pipeline.run())
    # Neither has spoilt anything.
    good = scripted(CONFIG, resume=run_dir)
    check_history(run_dir, CONFIG, virtually(good.pipeline.run()))


def test_source_without_a_cursor_is_refused_at_once() -> None:
    assert isinstance(ListTasks([1]), ResumableTaskSource)
    with pytest.raises(ConfigError, match=r"tasks is a Numbers without a cursor, .*checkpoint_every_steps at None"):
        Pipeline(
            tasks=Numbers(), rollout=one_turn, engines=[ScriptedEngine()], trainer=ScriptedTrainer(), config=CONFIG
        )
