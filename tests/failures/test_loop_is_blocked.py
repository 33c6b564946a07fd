"""The event loop is blocked, so nothing on it can say so: a thread outside of the interpreter does.

On the real clock: the blocked loop waits for the report, and this file waits for the loop, both with a limit.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import Scripted, one_turn

from staleflow import LLM, Config
from staleflow._core import LoopWatch, StallAlarm
from staleflow.errors import ConfigError

LIMIT_S = 0.2
PERIOD_S = 0.05
GIVE_UP_S = 60.0

HOLDS_THE_LOCK = """
import ctypes, sys
from staleflow._core import LoopWatch

def holds_the_interpreter_lock():
    # Unlike everything of `ctypes.CDLL`, this does not let go of the lock.
    ctypes.PyDLL(None).sleep(600)

watch = LoopWatch(0.2, 0.05, sys.argv[1], lambda: "never asked")
watch.beat(1.5, "batch 3 waits for group 7")
holds_the_interpreter_lock()
"""


def wait_for_report(folder: Path, word: str) -> str:
    """The report, as soon as it has the word."""
    until = time.monotonic() + GIVE_UP_S
    while time.monotonic() < until:
        for report in folder.glob("*-loop-blocked.txt"):
            if word in (text := report.read_text()):
                return text
        time.sleep(PERIOD_S)
    raise AssertionError(f"no report with {word!r} after {GIVE_UP_S:.0f} s")


@contextmanager
def watched(folder: Path, account: str = "batch 3 waits for group 7") -> Iterator[LoopWatch]:
    watch = LoopWatch(LIMIT_S, PERIOD_S, folder, lambda: account)
    try:
        yield watch
    finally:
        watch.stop()


def test_rollout_function_that_blocks_the_loop_is_named_and_the_run_goes_on(
    scripted: Scripted, capfd: pytest.CaptureFixture[str]
) -> None:
    async def blocks(task: int, llm: LLM) -> float:
        reward = await one_turn(task, llm)
        if task == 3:
            reports.append(wait_for_report(run.run_dir / "stalls", "in wait_for_report"))
        return reward

    reports: list[str] = []
    run = scripted(Config(steps=3, batch_size=2, group_size=1, stall_warning_s=2.0), rollout=blocks)
    assert asyncio.run(run.pipeline.run()).steps == 3
    [text] = reports
    over = wait_for_report(run.run_dir / "stalls", text)[len(text) :]
    assert "over: the event loop runs again" in over
    heading, tasks, threads = text.replace("# threads", "# tasks of the event loop").split("# tasks of the event loop")
    assert heading.startswith("the event loop has not run for")
    assert "batch" in heading
    assert "waits for" in heading
    assert "blocks" in tasks
    assert "in wait_for_report" in threads
    assert "the event loop has not run for" in capfd.readouterr().err


def test_stacks_are_told_of_while_the_blocked_thread_holds_the_interpreter_lock(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK, str(tmp_path)], stderr=subprocess.PIPE)
    try:
        text = wait_for_report(tmp_path, "in holds_the_interpreter_lock")
    finally:
        child.kill()
        _, stderr = child.communicate()
    assert "Python did not answer" in text
    assert "batch 3 waits for group 7" in text
    assert b"in holds_the_interpreter_lock" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["000001.5s-loop-blocked.txt"]


def test_account_that_raises_leaves_the_last_that_was_known(tmp_path: Path) -> None:
    def account() -> str:
        raise RuntimeError("dictionary changed size during iteration")

    watch = LoopWatch(LIMIT_S, PERIOD_S, tmp_path, account)
    watch.beat(0.0, "batch 3 waits for group 7")
    text = wait_for_report(tmp_path, "in wait_for_report")
    watch.stop()
    assert "dictionary changed size" in text
    assert "batch 3 waits for group 7" in text


def test_watch_ends_with_the_run_and_says_what_is_over(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/task")
    with watched(tmp_path) as watch:
        watch.beat(0.0, "")
        wait_for_report(tmp_path, "batch 3 waits for group 7")
    wait_for_report(tmp_path, "over")
    watch.stop()
    until = time.monotonic() + GIVE_UP_S
    while len(os.listdir("/proc/self/task")) > len(before) and time.monotonic() < until:
        time.sleep(PERIOD_S)
    assert len(os.listdir("/proc/self/task")) <= len(before)


def test_watch_that_nobody_stops_keeps_python_from_nothing(tmp_path: Path) -> None:
    script = f"from staleflow._core import LoopWatch; watch = LoopWatch(9, 1, {str(tmp_path)!r}, str)"
    assert subprocess.run([sys.executable, "-c", script], timeout=GIVE_UP_S, check=False).returncode == 0


def test_folder_that_cannot_be_made_is_named_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stalls").touch()
    asked = threading.Event()

    def account() -> str:
        asked.set()
        return "batch 3 waits for group 7"

    watch = LoopWatch(LIMIT_S, PERIOD_S, tmp_path / "stalls", account)
    assert asked.wait(GIVE_UP_S)
    watch.stop()
    told = capfd.readouterr().err
    assert "batch 3 waits for group 7" in told
    assert f"cannot write {tmp_path}/stalls" in told


def test_signals_of_the_program_are_left_alone(tmp_path: Path) -> None:
    with watched(tmp_path):
        pass
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGRTMIN) is signal.SIG_DFL


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_limits_that_can_never_be_right_are_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        LoopWatch(seconds, PERIOD_S, tmp_path, str)
    with pytest.raises(ConfigError, match="is not allowed"):
        StallAlarm(seconds)
