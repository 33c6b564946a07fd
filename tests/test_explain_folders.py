"""What can be told of runs that did not end well, of folders that hold none, and how the command tells it."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from explained import (
    RANDOM,
    TimedEngine,
    check_sums,
    explained,
    near,
    slow_reward,
    straggler,
    trainer,
)
from support import Scripted

from staleflow import LLM, Config
from staleflow.cli import main
from staleflow.errors import EngineError, RunFolderError, TrainerError
from staleflow.explain import Cause, Explanation, command, explain, read_run
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import TrainBatch
from staleflow.watchdog import BEAT_S

TOLD_OF_S = RANDOM.stall_warning_s + BEAT_S

# -- runs that did not end well ----------------------------------------------------------------------------------


def test_run_that_failed_is_explained_to_its_end(scripted: Scripted) -> None:
    class Fails(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> Any:
            if batch.step == 2:
                raise TrainerError("out of memory")
            return await super().step(batch)

    config = Config(steps=5, batch_size=1, group_size=2, max_staleness=0)
    run = scripted(config, engines=[TimedEngine()], trainer=Fails(step_s=1.0, publish_s=0.0))
    run.fail(TrainerError)
    found = explain(read_run(run.run_dir))
    check_sums(run, found)
    assert (found.published, found.until_s) == (2, 5.0)
    assert found.trainer.seconds == near({Cause.GENERATION: 3.0})
    assert all(wait.over for wait in found.waits)


def test_run_that_never_came_to_training_has_no_waits(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    class DoesNotStart(ScriptedEngine):
        async def start(self, name: str, log_folder: Path) -> None:
            await asyncio.sleep(3.0)
            raise EngineError("no such model")

    run = scripted(RANDOM, engines=[DoesNotStart()])
    run.fail(EngineError)
    found = explain(read_run(run.run_dir))
    assert (found.phase, found.training_s, found.waits) == ("starting", 0.0, ())
    assert main(["explain", str(run.run_dir)]) == 0
    assert "Waiting counts while the run trains; so far it has not." in capsys.readouterr().out
    assert main(["explain", str(run.run_dir), "--at", "0"]) == 0
    assert "the trainer is not asked to train" in capsys.readouterr().out


def test_run_that_was_killed_is_explained_as_far_as_both_files_go(scripted: Scripted) -> None:
    """Both files end anywhere, each for itself."""
    config = msgspec.structs.replace(RANDOM, steps=20)
    run = scripted(config, engines=[ScriptedEngine(seed=4, token_s=0.1)], trainer=trainer(0.3))
    whole = explained(run)
    events, journal = run.run_dir / "events.jsonl", run.run_dir / "ledger.journal"
    whole_events, whole_journal = events.read_bytes(), journal.read_bytes()
    rng = random.Random(5)
    begun = 0
    for _ in range(200):
        events.write_bytes(whole_events[: rng.randrange(len(whole_events))])
        journal.write_bytes(whole_journal[: rng.choice([0, rng.randrange(60, len(whole_journal))])])
        found = explain(read_run(run.run_dir))
        assert found.until_s <= whole.until_s
        assert sum(found.trainer.seconds.values()) == pytest.approx(found.trainer.waited_s)
        assert len(found.waits) <= len(whole.waits)
        for known, wait in zip(found.waits, whole.waits, strict=False):
            assert all(seconds <= wait.seconds.get(cause, 0.0) + 1e-9 for cause, seconds in known.seconds.items())
            assert known == wait or (known.begin_s == wait.begin_s and known.waited_s <= wait.waited_s)
        begun += found.training_s > 0
    assert begun > 50


def test_stalled_run_brings_its_folder_up_to_date_when_it_says_so(scripted: Scripted) -> None:
    seen: list[Explanation] = []

    async def stalls(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=1)
        await asyncio.sleep(TOLD_OF_S)
        seen.append(explain(read_run(run.run_dir)))
        return 1.0

    config = Config(steps=1, batch_size=1, group_size=1, rollout_timeout_s=500)
    run = scripted(config, rollout=stalls, engines=[TimedEngine()])
    run.run()
    [wait] = seen[0].waits
    assert wait.seconds == near({Cause.GENERATION: 1.0, Cause.ROLLOUT_FUNCTION: TOLD_OF_S - 1.0})
    assert str(wait) == (
        f"batch 0 has waited {TOLD_OF_S:.2f} s for group 1: member 0 in the rollout function since 1.0 s"
    )


# -- folders that hold no run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "events.jsonl", "ledger.journal"])
def test_missing_file_is_named(scripted: Scripted, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = scripted(Config(steps=1, batch_size=1, group_size=1))
    run.run()
    (run.run_dir / name).unlink()
    assert main(["explain", str(run.run_dir)]) == 1
    message = capsys.readouterr().err
    assert f"{run.run_dir / name} does not exist: give the folder of a run" in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{}", r"config\.json is damaged: .*`config`; restore it from a copy"),
        ("config.json", b"\xff", r"config\.json is damaged: .*; restore it from a copy"),
        (
            "events.jsonl",
            b'{"event":"phase_began","t":0.0,"phase":"starting"}\n?\n',
            r"events\.jsonl, line 2 is no event",
        ),
        ("events.jsonl", b'{"event":"routed","t":0.0,"request":"1.0.0.0","engine":0}\n', "contradicts itself at 0.0"),
        ("events.jsonl", b'{"event":"phase_began","t":1e308,"phase":"training"}\n', "line 1 is no event"),
        ("events.jsonl", b'{"event":"sync_began","t":0.0,"engine":-1,"version":1}\n', "line 1 is no event"),
        ("ledger.journal", b"something else altogether", r"ledger\.journal is damaged: .*; restore it from a copy"),
    ],
)
def test_damaged_file_is_named(scripted: Scripted, name: str, content: bytes, message: str) -> None:
    run = scripted(Config(steps=1, batch_size=1, group_size=1))
    run.run()
    (run.run_dir / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=message):
        explain(read_run(run.run_dir))


def test_settings_of_another_run_are_noticed(scripted: Scripted, tmp_path: Path) -> None:
    run = scripted(Config(steps=1, batch_size=2, group_size=1))
    run.run()
    other = scripted(Config(steps=1, batch_size=3, group_size=1), run_dir=tmp_path / "other")
    other.run()
    (run.run_dir / "config.json").write_bytes((other.run_dir / "config.json").read_bytes())
    with pytest.raises(RunFolderError, match=r"config\.json has batch_size 3 and ledger\.journal 2"):
        read_run(run.run_dir)


def test_flipped_byte_in_the_journal_is_noticed(scripted: Scripted) -> None:
    run = scripted(Config(steps=2, batch_size=1, group_size=1))
    run.run()
    journal = run.run_dir / "ledger.journal"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"ledger\.journal is damaged: .*; restore it from a copy"):
        read_run(run.run_dir)


def test_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"file/config\.json cannot be read: Not a directory"):
        read_run(tmp_path / "file")


# -- the command -------------------------------------------------------------------------------------------------


def test_command_prints_a_table_and_the_longest_waits(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(steps=2, batch_size=1, group_size=2, max_staleness=0)
    run = scripted(config, rollout=slow_reward(4.0), engines=[TimedEngine()], trainer=trainer(2.0))
    run.run()
    assert main(["explain", str(run.run_dir)]) == 0
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Known until 14.00 s, in phase 'done': 2 of 2 steps, 14.00 s of training."
    assert "trainer rollout functions are at work 8.00 57.1%" in lines
    assert "all 10.00 71.4%" in lines
    assert "engine 0 rollout functions are at work 8.00 57.1%" in lines
    assert lines[-3:] == [
        "The longest of 2 waits of the trainer:",
        "batch 0 waited 5.00 s for group 1: member 0 in the rollout function since 1.0 s "
        "(4.00 s rollout functions are at work, 1.00 s members are still being generated)",
        "batch 1 waited 5.00 s for group 2: member 0 in the rollout function since 8.0 s "
        "(4.00 s rollout functions are at work, 1.00 s members are still being generated)",
    ]


def test_command_prints_json(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    run = straggler(scripted)
    run.run()
    assert main(["explain", str(run.run_dir), "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Explanation)
    assert found == explain(read_run(run.run_dir))
    assert main(["explain", str(run.run_dir), "--at", "5", "--json"]) == 0
    now = json.loads(capsys.readouterr().out)
    assert (now["cause"], now["trainer"]["state"], now["blockers"][0]["member"]) == ("generation", "waits_for_batch", 3)


def test_progress_shows_when_it_takes_long(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scripted(Config(steps=1, batch_size=1, group_size=1))
    run.run()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["explain", str(run.run_dir)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 0.0)
    assert main(["explain", str(run.run_dir)]) == 0
    assert "reading events" in capsys.readouterr().err


def test_python_m_is_the_command(scripted: Scripted) -> None:
    run = scripted(Config(steps=1, batch_size=1, group_size=1))
    run.run()
    command = [sys.executable, "-m", "staleflow", "explain", str(run.run_dir)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "1 of 1 steps" in printed
