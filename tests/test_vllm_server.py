"""The life of a server's process, with a program in vLLM's place."""

import asyncio
import sys
from pathlib import Path

import pytest
from processes import gone

from staleflow.engines import vllm_server
from staleflow.engines.vllm_server import VllmServer, launch_vllm
from staleflow.errors import ConfigError, EngineError

HEALTHY = """
import http.server, os, sys

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


class Pretended(VllmServer):
    """Runs a program instead of vLLM; its argument is the port."""

    program = HEALTHY

    def _command(self, name: str, port: int) -> list[str]:
        return [sys.executable, "-c", self.program, str(port), *super()._command(name, port)[1:]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_check_installed", lambda transfer: None)


def test_server_starts_stops_and_starts_again(model: Path, tmp_path: Path) -> None:
    async def main() -> list[int]:
        server = Pretended(model)
        pids = []
        for _ in range(2):
            url = await server.start("engine-0", tmp_path)
            assert url.startswith("http://127.0.0.1:")
            pids.append(server.pid)
            await server.stop()
            await server.stop()
        return pids

    assert gone(asyncio.run(main()))


def test_server_gets_what_staleflow_needs_of_it(model: Path) -> None:
    server = VllmServer(model, seed=3, arguments=["--max-num-seqs", "8"], environment={"A": "b"}, secret="s", threads=2)
    command, other = (server._command(name, 8000) for name in ("engine-0", "engine-1"))
    assert {"--enable-scale-out", "processed_logprobs", '{"backend": "staleflow"}'} <= set(command)
    assert command[-2:] == ["--max-num-seqs", "8"]
    assert command[command.index("--seed") + 1] != other[other.index("--seed") + 1]
    variables = server._variables()
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["A"] == "b"
    assert variables["STALEFLOW_SECRET"] == "s"
    assert "secret" not in repr(server.settings)


@pytest.mark.parametrize("installed", [True, False])
def test_server_without_a_gpu_is_one_process_unless_it_is_to_be_several(
    model: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [name] if installed else [])
    backend, variable = "--distributed-executor-backend", "VLLM_ENABLE_V1_MULTIPROCESSING"
    alone, divided = VllmServer(model), VllmServer(model, arguments=["--tensor_parallel_size", "2"])
    assert (backend in alone._command("engine-0", 8000)) == (variable in alone._variables()) == installed
    assert backend not in divided._command("engine-0", 8000)
    assert variable not in divided._variables()


def test_server_that_weights_are_broadcast_to_is_started_without_the_plug_in(model: Path) -> None:
    [engine] = launch_vllm(model, 1, broadcast_from="10.0.0.1")
    assert engine.settings.broadcast_from == "10.0.0.1"
    command = VllmServer(model, transfer="nccl")._command("engine-0", 8000)
    assert '{"backend": "nccl"}' in command
    assert "--worker-extension-cls" not in command
    with pytest.raises(ConfigError, match="transfer is 'ipc'; it must be one of staleflow, nccl"):
        VllmServer(model, transfer="ipc")  # type: ignore[arg-type]


def test_server_that_dies_at_its_start_says_why(model: Path, tmp_path: Path) -> None:
    class Dies(Pretended):
        program = "raise SystemExit('cannot load the model')"

    with pytest.raises(EngineError, match=r"engine-0 .* exited with code 1.*\n.*cannot load the model"):
        asyncio.run(Dies(model).start("engine-0", tmp_path))


def test_server_that_does_not_answer_in_time_is_ended(model: Path, tmp_path: Path) -> None:
    class Hangs(Pretended):
        program = "import time; print('loading', flush=True); time.sleep(1000)"

    async def main() -> int:
        server = Hangs(model, start_timeout_s=0.3)
        with pytest.raises(EngineError, match=r"engine-0 did not answer within 0 s"):
            await server.start("engine-0", tmp_path)
        return server.pid

    assert gone([asyncio.run(main())])


def test_start_that_is_cancelled_leaves_no_process(model: Path, tmp_path: Path) -> None:
    class Hangs(Pretended):
        program = "import time; time.sleep(1000)"
        runs = asyncio.Event()

        async def _ready(self, name: str, port: int) -> None:
            self.runs.set()
            await super()._ready(name, port)

    async def main() -> int:
        server = Hangs(model)
        starting = asyncio.create_task(server.start("engine-0", tmp_path))
        await server.runs.wait()
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        return server.pid

    assert gone([asyncio.run(main())])


def test_port_that_was_taken_meanwhile_is_replaced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clumsy(Pretended):
        program = f"""
import sys
if sys.argv[1] == "1":
    raise SystemExit("[Errno 98] Address already in use")
{HEALTHY}"""

    free_port = vllm_server._free_port
    ports = iter([1])
    monkeypatch.setattr(vllm_server, "_free_port", lambda: next(ports, None) or free_port())

    async def main() -> str:
        server = Clumsy(model)
        url = await server.start("engine-0", tmp_path)
        await server.stop()
        return url

    assert not asyncio.run(main()).endswith(":1")
    with pytest.raises(EngineError, match="Address already in use"):
        asyncio.run(Clumsy(model, port=1).start("engine-0", tmp_path))


def test_server_that_was_not_started_says_so(model: Path) -> None:
    server = VllmServer(model)
    asyncio.run(server.stop())
    with pytest.raises(EngineError, match="was not started"):
        asyncio.run(server.died())


def test_unusable_settings_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such Hugging Face folder"):
        VllmServer(tmp_path)
    with pytest.raises(ConfigError, match="threads is 0"):
        VllmServer(model, threads=0)
    with pytest.raises(ConfigError, match="cache_gib is 0"):
        VllmServer(model, cache_gib=0)
    with pytest.raises(ConfigError, match="start_timeout_s is 0"):
        VllmServer(model, start_timeout_s=0)


def test_environment_without_vllm_or_plugin_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="`make vllm` installs it"):
        vllm_server._check_installed("staleflow")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **selected: [])
    with pytest.raises(ConfigError, match="would not find staleflow's plug-in"):
        vllm_server._check_installed("staleflow")
