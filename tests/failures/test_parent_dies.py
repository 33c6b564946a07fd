"""The controller is killed: its children end by themselves and keep nothing alive."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAIT_S = 15.0


def wait_for_end(pidfd: int) -> bool:
    readable, _, _ = select.select([pidfd], [], [], WAIT_S)
    return bool(readable)


@pytest.mark.parametrize("behaviour", ["serve", "flood"])
def test_H17_children_of_a_killed_controller_exit(
    importable_children: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behaviour: str
) -> None:
    """However much the child has said that the controller has not read."""
    monkeypatch.setenv("TINY_CHILD", behaviour)
    log = tmp_path / "child.log"
    with subprocess.Popen(
        [sys.executable, "-m", "tiny_controller", str(log)], stdout=subprocess.PIPE, text=True
    ) as controller:
        assert controller.stdout is not None
        child = os.pidfd_open(int(controller.stdout.readline()))
        try:
            controller.send_signal(signal.SIGKILL)
            assert wait_for_end(child), log.read_text()
        finally:
            os.close(child)
