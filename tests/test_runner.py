"""``staleflow.run`` in a process of its own: signals, exit codes, and what rollout functions leave running.

Run as a script, this file is that process: ``python -m test_runner SCENARIO FOLDER``.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import one_turn

import staleflow
from staleflow import LLM, Config, ListTasks, Pipeline
from staleflow.checkpoints import newest_step, open_checkpoint
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.rollout import Rollout
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import StepMetrics, TrainBatch

HANG_S = 3600.0
SOON_S = 25.0
"""Far more than the graces a run gives its leftovers, on a busy machine; far less than ``HANG_S``."""
JUDGES = 32

# -- the process -------------------------------------------------------------------------------------------------


def say(what: str) -> None:
    print(what, flush=True)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


class Trainer(ScriptedTrainer):
    """Says what it does; ``save`` leaves a folder, after ``save_s``. Saving its state hangs after step ``hangs_at``,
    when one of two files is written, until there is a file ``go_on``."""

    def __init__(self, save_s: float, hangs_at: int | None, go_on: Path) -> None:
        super().__init__(step_s=0.02, publish_s=0.01)
        self._save_s = save_s
        self._hangs_at = hangs_at
        self._go_on = go_on

    async def step(self, batch: TrainBatch) -> StepMetrics:
        if batch.step == 1:
            say("trained")
        return await super().step(batch)

    async def save_state(self, folder: Path) -> None:
        say("saving its state")
        if self.steps == self._hangs_at:
            folder.mkdir()  # noqa: ASYNC240 - a stand-in for what a child does
            (folder / "first").write_text(str(self.steps))
            say("half saved")
            await asyncio.to_thread(wait_for, self._go_on)
            shutil.rmtree(folder)
        await super().save_state(folder)

    async def save(self, folder: Path) -> None:
        say("saving")
        await asyncio.sleep(self._save_s)
        folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else runs any more
        print("saved, and not flushed")


async def never_answers(task: int, llm: LLM) -> float:
    say("playing")
    await asyncio.sleep(HANG_S)
    return 0.0


async def swallows_cancellation(task: int, llm: LLM) -> float:
    while task == 1:
        try:
            await asyncio.sleep(HANG_S)
        except asyncio.CancelledError:
            continue
    return await one_turn(task, llm)


def hang() -> None:
    time.sleep(HANG_S)


async def hung_judge(task: int, llm: LLM) -> float:
    reward = await one_turn(task, llm)
    if task == 1:
        await asyncio.to_thread(hang)
    return reward


async def hung_judges(task: int, llm: LLM) -> float:
    """As many threads hang as asyncio starts by itself on a large machine."""
    if task == 0:
        pool = ThreadPoolExecutor(JUDGES)
        for _ in range(JUDGES):
            pool.submit(hang)
    return await one_turn(task, llm)


def run(
    folder: Path,
    rollout: Rollout[int] = one_turn,
    *,
    steps: int = 10**6,
    save_s: float = 0.0,
    every: int | None = None,
    hangs_at: int | None = None,
    resume: bool = False,
) -> None:
    config = Config(
        steps=steps,
        batch_size=2,
        group_size=1,
        rollout_timeout_s=0.5 if rollout in (swallows_cancellation, hung_judge, hung_judges) else 300.0,
        max_attempts=1,
        checkpoint_every_steps=every,
    )
    report = staleflow.run(
        Pipeline(
            tasks=ListTasks(range(1000), seed=None),
            rollout=rollout,
            engines=[ScriptedEngine()],
            trainer=Trainer(save_s, hangs_at, folder / "go on"),
            config=config if rollout is not never_answers else Config(steps=1),
            parameter_server=SharedMemoryParameterServer(folder),
            run_dir=folder / "run",
            resume=folder / "run" if resume else None,
            progress=False,
        )
    )
    say(f"returned: {report.ended} after {report.steps} steps, failed {report.accounting.failed_attempts}")


async def names_its_loop(task: int, llm: LLM) -> float:
    if task == 0:
        say(f"on {type(asyncio.get_running_loop()).__module__}")
    return await one_turn(task, llm)


def main(scenario: str, folder: Path) -> None:
    # A shell without job control has told its background processes to ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    match scenario:
        case "short":
            run(folder, names_its_loop, steps=3)
        case "short without uvloop":
            sys.modules["uvloop"] = None  # type: ignore[assignment]
            run(folder, names_its_loop, steps=3)
        case "long":
            run(folder)
        case "long without uvloop":
            sys.modules["uvloop"] = None  # type: ignore[assignment]
            run(folder)
        case "no answer":
            run(folder, never_answers)
        case "with checkpoints":
            run(folder, every=1)
        case "hangs while saving":
            run(folder, every=2, hangs_at=4)
        case "with a checkpoint at the end":
            run(folder, every=10**6)
        case "slow checkpoint":
            run(folder, save_s=100.0, every=10**6)
        case "resumed":
            run(folder, steps=(newest_step(folder / "run") or 0) + 3, resume=True)
        case "slow save":
            run(folder, save_s=100.0)
        case "stubborn rollout":
            run(folder, swallows_cancellation, steps=3)
        case "hung judge":
            run(folder, hung_judge)
        case "hung judges":
            run(folder, hung_judges)
        case "hung judge, short":
            run(folder, hung_judge, steps=3)
            # The thread would keep the process alive, of which the run has warned.
            os._exit(0)
        case _:
            raise ValueError(scenario)


# -- the tests ---------------------------------------------------------------------------------------------------


class Running:
    """The process, from outside."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def wait_for(self, what: str) -> None:
        """Read what the process says until it says this."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == what:
                return
        raise AssertionError(f"the process ended before it said {what!r}: {self.end()}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end, which must come soon; returns the exit code and what was said meanwhile."""
        out, err = self._process.communicate(timeout=SOON_S)
        return self._process.returncode, out, err


@contextmanager
def started(scenario: str, folder: Path) -> Iterator[Running]:
    with subprocess.Popen(
        [sys.executable, "-m", "test_runner", scenario, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


pytestmark = pytest.mark.usefixtures("importable_children")


@pytest.mark.parametrize(("scenario", "loop"), [("short", "uvloop"), ("short without uvloop", "asyncio.")])
def test_end_returns_the_report(tmp_path: Path, scenario: str, loop: str) -> None:
    with started(scenario, tmp_path) as process:
        code, out, err = process.end()
    assert (code, err) == (0, "")
    first, *_, last = out.splitlines()
    assert first.startswith(f"on {loop}")
    assert last == "returned: all_steps_done after 3 steps, failed {}"


@pytest.mark.parametrize("scenario", ["long", "long without uvloop"])
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_run_in_order(tmp_path: Path, scenario: str, number: signal.Signals, expected: int) -> None:
    with started(scenario, tmp_path) as process:
        process.wait_for("trained")
        [weights] = tmp_path.glob("staleflow-*")
        process.send(number)
        code, _, err = process.end()
    assert code == expected
    checkpoint = tmp_path / "run" / "checkpoint"
    assert err == f"\nInterrupted; the checkpoint is {checkpoint}\n"
    assert checkpoint.is_dir()
    assert not weights.exists()


def test_interrupted_before_the_first_step_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    with started("no answer", tmp_path) as process:
        process.wait_for("playing")
        process.send(signal.SIGINT)
        code, _, err = process.end()
    assert (code, err) == (130, "\nInterrupted; there is no checkpoint\n")


def test_second_interrupt_does_not_wait_for_the_checkpoint(tmp_path: Path) -> None:
    with started("slow save", tmp_path) as process:
        process.wait_for("trained")
        process.send(signal.SIGINT)
        process.wait_for("saving")
        process.send(signal.SIGINT)
        code, _, err = process.end()
    assert code == 130
    assert "Interrupted; there is no checkpoint" in err


def test_H1_rollout_that_swallows_cancellation_cannot_keep_the_run(tmp_path: Path) -> None:
    with started("stubborn rollout", tmp_path) as process:
        code, out, err = process.end()
    assert code == 0
    # On a machine that stands still for a moment others may be too late as well.
    assert re.search(r"returned: all_steps_done after 3 steps, failed {'RolloutTimeoutError': \d+}$", out)
    assert "abandoned a task that ignores its cancellation" in err


@pytest.mark.parametrize("scenario", ["hung judge", "hung judges"])
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_judge_that_hangs_in_a_thread_cannot_hold_up_a_signal(
    tmp_path: Path, scenario: str, number: signal.Signals, expected: int
) -> None:
    with started(scenario, tmp_path) as process:
        process.wait_for("trained")
        process.send(number)
        code, out, err = process.end()
    assert code == expected
    assert "Interrupted; the checkpoint is" in err
    assert "saved, and not flushed" in out
    assert list(tmp_path.glob("staleflow-*")) == []


def test_judge_that_hangs_in_a_thread_cannot_keep_the_run(tmp_path: Path) -> None:
    with started("hung judge, short", tmp_path) as process:
        code, out, err = process.end()
    assert code == 0
    assert out.splitlines()[-1].startswith("returned: all_steps_done after 3 steps")
    assert "1 threads begun by rollout functions still run" in err


def test_run_that_was_killed_goes_on_in_another_process(tmp_path: Path) -> None:
    with started("with checkpoints", tmp_path) as process:
        process.wait_for("trained")
        process.send(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL
    step = newest_step(tmp_path / "run")
    assert step is not None
    with started("resumed", tmp_path) as process:
        code, out, err = process.end()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"returned: all_steps_done after {step + 3} steps, failed {{}}"


def test_interrupted_run_tells_how_it_can_go_on(tmp_path: Path) -> None:
    with started("with checkpoints", tmp_path) as process:
        process.wait_for("trained")
        process.send(signal.SIGTERM)
        code, _, err = process.end()
    assert code == 143
    run_dir, step = tmp_path / "run", newest_step(tmp_path / "run")
    told = f"\nInterrupted; the checkpoint is {run_dir / 'checkpoint'}; resume='{run_dir}' goes on after step {step}\n"
    assert err.endswith(told)
    assert err.startswith("interrupted: a step that is under way is finished and a checkpoint saved, within 120 s;")


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_saves_a_checkpoint_though_none_is_due(
    tmp_path: Path, number: signal.Signals, expected: int
) -> None:
    with started("with a checkpoint at the end", tmp_path) as process:
        process.wait_for("trained")
        process.send(number)
        assert process.end()[0] == expected
    step = newest_step(tmp_path / "run")
    assert step is not None
    assert step > 0
    with started("resumed", tmp_path) as process:
        code, out, err = process.end()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"returned: all_steps_done after {step + 3} steps, failed {{}}"


def test_second_interrupt_does_not_wait_for_the_checkpoint_to_resume_from(tmp_path: Path) -> None:
    with started("slow checkpoint", tmp_path) as process:
        process.wait_for("trained")
        process.send(signal.SIGINT)
        process.wait_for("saving its state")
        process.send(signal.SIGINT)
        code, _, err = process.end()
    assert code == 130
    assert "Interrupted; there is no checkpoint" in err
    assert newest_step(tmp_path / "run") is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_between_two_files_of_a_checkpoint_lets_it_become_whole(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with started("hangs while saving", tmp_path) as process:
        process.wait_for("half saved")
        process.send(number)
        (tmp_path / "go on").touch()
        assert process.end()[0] == code
    check_goes_on(tmp_path, after=4)


def test_killed_between_two_files_of_a_checkpoint_leaves_the_older_one(tmp_path: Path) -> None:
    with started("hangs while saving", tmp_path) as process:
        process.wait_for("half saved")
        assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4.partial"]
        process.send(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL
    check_goes_on(tmp_path, after=2)


def check_goes_on(folder: Path, *, after: int) -> None:
    assert open_checkpoint(folder / "run").cut.step == after
    with started("resumed", folder) as process:
        code, out, err = process.end()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"returned: all_steps_done after {after + 3} steps, failed {{}}"
    assert list((folder / "run").glob("checkpoints/*.partial")) == []


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
