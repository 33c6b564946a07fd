"""Real servers that end, and a controller that does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import descendants, gone

from .conftest import RealServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture
def server(servers: list[RealServer]) -> RealServer:
    return servers[1]


def test_server_that_was_killed_is_noticed_leaves_nothing_and_starts_again(server: RealServer) -> None:
    assert server.version() == server.version()
    pid = server.server.pid
    tree = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    assert "was ended by SIGKILL. Last lines of" in str(server.died())
    assert gone([pid, *tree])
    server.post("/update_weight_version", {"new_version": "0"})
    assert server.generate(4)["finish_reason"] == "length"
    assert server.server.pid != pid
    server.stop()


def test_server_is_gone_when_the_controller_is_killed(server: RealServer, model: Path, tmp_path: Path) -> None:
    server.stop()
    controller = subprocess.Popen(
        [sys.executable, "-m", "vllm_controller", str(model), str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    with controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        tree = descendants(pid)
        assert tree
        controller.kill()
    assert gone([pid, *tree])
