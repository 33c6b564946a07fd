"""Programs that know nothing of staleflow: they end with the controller, and the controller hears of their end."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import descendants, gone

from staleflow import process
from staleflow.errors import EngineError
from staleflow.leash import Leashed

FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"])
open("ready", "w").close()
time.sleep(1000)
"""
"""Ignores SIGTERM, and has a child, one in a session of its own, and one there whose parent has ended."""


async def start(program: str, folder: Path) -> Leashed:
    return await Leashed.start(
        "engine-0",
        [sys.executable, "-c", program],
        environment={"GREETING": "good morning"},
        log_path=folder / "engine-0.log",
        error=EngineError,
    )


async def family(folder: Path) -> tuple[Leashed, list[int]]:
    """It and all of its processes, the one in between included."""
    ready = folder / "ready"
    os.mkfifo(ready)
    leashed = await start(f"import os; os.chdir({str(folder)!r})\n{FAMILY}", folder)
    await asyncio.to_thread(ready.read_text)
    (between,) = (pid for pid in descendants(os.getpid()) if leashed.pid in descendants(pid))
    return leashed, [between, *descendants(between)]


def test_program_gets_its_environment_and_its_end_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def main() -> EngineError:
        leashed = await start("import os, sys; print(os.environ['GREETING']); sys.exit(3)", tmp_path)
        death = await leashed.died()
        await leashed.stop()
        assert isinstance(death, EngineError)
        return death

    death = str(asyncio.run(main()))
    assert "exited with code 3" in death
    assert death.endswith("good morning")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_signal_that_ended_the_program_is_named(tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> str:
        leashed = await start("import time; time.sleep(1000)", tmp_path)
        os.kill(leashed.pid, number)
        return str(await leashed.died())

    assert f"was ended by {number.name}" in asyncio.run(main())


def test_program_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        await Leashed.start("engine-0", ["/nowhere"], environment={}, log_path=tmp_path / "log", error=EngineError)

    with pytest.raises(EngineError, match="No such file or directory: '/nowhere'"):
        asyncio.run(main())


def test_stopping_ends_all_that_the_program_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What other children are given would not do.
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.0)

    async def main() -> list[int]:
        leashed, pids = await family(tmp_path)
        await leashed.stop()
        await leashed.stop()
        return pids

    pids = asyncio.run(main())
    assert len(pids) == 5
    assert gone(pids)


def test_nothing_is_left_of_a_program_that_was_killed(tmp_path: Path) -> None:
    async def main() -> list[int]:
        leashed, pids = await family(tmp_path)
        os.kill(leashed.pid, signal.SIGKILL)
        assert "was ended by SIGKILL" in str(await leashed.died())
        return pids

    assert gone(asyncio.run(main()))


def test_program_is_ended_when_the_process_in_between_is_killed(tmp_path: Path) -> None:
    async def main() -> list[int]:
        leashed = await start("import time; time.sleep(1000)", tmp_path)
        (between,) = (pid for pid in descendants(os.getpid()) if leashed.pid in descendants(pid))
        os.kill(between, signal.SIGKILL)
        assert "was ended by SIGKILL" in str(await leashed.died())
        return [between, leashed.pid]

    assert gone(asyncio.run(main()))


def test_nothing_is_left_when_the_controller_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from test_leash import family

async def main():
    leashed, pids = await family(Path({str(tmp_path)!r}))
    print(*pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    controller = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    )
    with controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        controller.kill()
    assert len(pids) == 5
    assert gone(pids)
