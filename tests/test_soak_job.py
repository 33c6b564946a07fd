"""What ``make chaos-resume`` sees of a job: its processes, wherever they are, and what it does."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import lives, until
from resumed import killed, whole_checkpoints
from soak.job import Job
from soak.plan import Moment, Victim
from soak.shared_memory import contents, left_behind
from support import Scripted

from staleflow import Config
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer

GONE_S = 20.0
CHILD = "import sys, time; open(sys.argv[1], 'a').write('c'); time.sleep(600)"
FAMILY = f"""
import subprocess, sys, time
started = [subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1], *more], start_new_session=True)
           for more in ([], ["staleflow.trainer.rank"])]
started[-1].wait()
sys.exit(1)
"""
"""A controller that ends when its trainer does, and whose children outlive it."""
Start = Callable[[Path], Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job with two children, which are there when it returns."""
    jobs = []

    def started(run_dir: Path) -> Job:
        ready = tmp_path / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-c", FAMILY, str(ready)]
        jobs.append(Job(command, run_dir, tmp_path / "job.log", evaluate_every_steps=4))
        until(lambda: ready.exists() and ready.read_text() == "cc", GONE_S, "both children are there")
        return jobs[-1]

    yield started
    for job in jobs:
        job.end()


def test_every_process_of_a_job_is_seen_and_no_other(start: Start, tmp_path: Path) -> None:
    job = start(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        assert len(job.processes()) == 3
        assert job.has_trainer
        other.kill()


def test_child_that_outlives_a_killed_controller_is_seen(start: Start, tmp_path: Path) -> None:
    job = start(tmp_path / "run")
    assert job.strike(Victim.CONTROLLER) is Moment.START_UP
    until(lambda: job.exit_code is not None, GONE_S, "the controller has ended")
    assert job.exit_code == -9
    assert not job.gone_within(0.0)
    assert len(job.processes()) == 2
    job.end()
    assert job.gone_within(GONE_S)


def test_killing_the_trainer_leaves_the_rest_to_the_controller(start: Start, tmp_path: Path) -> None:
    job = start(tmp_path / "run")
    job.strike(Victim.TRAINER)
    until(lambda: job.exit_code is not None, GONE_S, "the controller has ended")
    assert not job.gone_within(0.0)
    assert not job.has_trainer
    [engine] = job.processes()
    engine.kill()
    assert job.gone_within(GONE_S)
    assert job.exit_code == 1


def test_killing_everything_leaves_nothing(start: Start, tmp_path: Path) -> None:
    job = start(tmp_path / "run")
    family = job.processes()
    job.strike(Victim.EVERYTHING)
    assert job.gone_within(GONE_S)
    assert job.exit_code == -9
    assert not any(lives(process) for process in family)


@pytest.fixture
def remains(scripted: Scripted, tmp_path: Path) -> Path:
    """What a run has left that was killed some steps after its second checkpoint."""
    config = Config(steps=40, batch_size=2, group_size=2, checkpoint_every_steps=3)
    assert killed(scripted(config), 2.5, tmp_path / "killed") is None
    return tmp_path / "killed"


def test_steps_of_a_killed_process_are_not_taken_for_those_of_the_next(start: Start, remains: Path) -> None:
    lines = (remains / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    saved = whole_checkpoints(remains)[-1]
    assert len(lines) > saved
    job = start(remains)
    assert (job.resumed_from, job.trained, job.steps) == (saved, 0, saved)
    (remains / "metrics.jsonl").write_bytes(b"".join(lines[:saved]))
    assert job.trained == 0
    (remains / "metrics.jsonl").write_bytes(b"".join(lines))
    assert (job.trained, job.steps) == (len(lines) - saved, len(lines))


def test_moment_is_told_by_the_files(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    metrics, events = run_dir / "metrics.jsonl", run_dir / "events.jsonl"
    evaluated = '{"event":"evaluated","t":1.0,"step":4,"reward":0.5,"tasks":4,"failed":0,"versions":[4,4]}\n'
    events.touch()

    def moment(steps: int, *, saving: bool = False, log: str = "") -> Moment:
        job = start(run_dir)
        assert job.trained == 0
        metrics.write_text("{}\n" * steps)
        events.write_text(log)
        partial = run_dir / "checkpoints" / "6.partial"
        if saving:
            partial.mkdir()
        seen = job.strike(Victim.EVERYTHING)
        assert job.gone_within(GONE_S)
        metrics.unlink()
        if saving:
            partial.rmdir()
        return seen

    assert moment(0) is Moment.START_UP
    assert moment(3) is Moment.TRAINING
    assert moment(3, saving=True) is Moment.SAVING
    assert moment(4) is Moment.EVALUATION
    assert moment(6) is Moment.EVALUATION
    assert moment(6, log=evaluated) is Moment.TRAINING


def test_weights_without_an_owner_are_found_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soak.shared_memory.FOLDER", tmp_path)
    monkeypatch.setattr("soak.shared_memory.GRACE_S", 0.0)
    (tmp_path / "staleflow-of-before").mkdir()
    before = contents()
    (tmp_path / "of-others").touch()
    (tmp_path / "staleflow-left").mkdir()
    (tmp_path / "staleflow-left" / "lock").touch()
    assert left_behind(before) == ["staleflow-left"]
    owner = SharedMemoryParameterServer(tmp_path)
    assert left_behind(before) == []
    owner.close()
    assert left_behind(before) == []
