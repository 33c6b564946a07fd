"""The HTTP face of a vLLM server: one method per call, typed answers, errors that repeat what the server says.

It knows paths and shapes. When to call what, and what an answer means, is for others to know.

Every method raises :class:`EngineError`, in one of its kinds: :class:`EngineStatusError` for an HTTP error,
:class:`EngineReplyError` for an answer that is broken off or has another shape, :class:`EngineTimeoutError` for none
within ``CALL_TIMEOUT_S``, and the plain one if the server cannot be reached.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from staleflow.errors import EngineError, EngineReplyError, EngineStatusError, EngineTimeoutError

Answer = TypeVar("Answer")

CALL_TIMEOUT_S = 60.0
"""For calls that do not generate. A pause waits for the step that is running, and the first step of all takes long."""
JOIN_TIMEOUT_S = 120.0
TRANSFER_TIMEOUT_S = 3600.0
"""For weights that come during the call. Whoever makes it has a deadline of its own."""
DESCRIBE_TIMEOUT_S = 120.0
"""For the server's settings: it looks at its whole machine before it answers."""
KEEP_ALIVE_S = 2.0
"""Below the five seconds after which vLLM closes an idle connection: a request sent at that moment would be lost."""
SHOWN_CHARACTERS = 300


class Version(msgspec.Struct):
    """``GET /version``."""

    version: str


class WeightInfo(msgspec.Struct):
    """``GET /weight_info``."""

    weight_version: str


class PauseState(msgspec.Struct):
    """``GET /is_paused``."""

    is_paused: bool


class ModelCard(msgspec.Struct):
    """One model that the server offers."""

    id: str
    max_model_len: int
    root: str


class ModelList(msgspec.Struct):
    """``GET /v1/models``."""

    data: list[ModelCard]


class Tokenized(msgspec.Struct):
    """``POST /tokenize``."""

    tokens: list[int]


class ModelConfig(msgspec.Struct):
    """The part of the server's model configuration that matters here."""

    logprobs_mode: str


class WeightTransferConfig(msgspec.Struct):
    """How the server takes new weights."""

    backend: str


class ParallelConfig(msgspec.Struct):
    """The server's workers: what they were extended with, and how many there are, in each of its replicas."""

    worker_extension_cls: str = ""
    world_size: int = 1
    data_parallel_size: int = 1


class VllmConfig(msgspec.Struct):
    """The server's settings."""

    model_config: ModelConfig
    parallel_config: ParallelConfig
    weight_transfer_config: WeightTransferConfig | None = None


class ServerInfo(msgspec.Struct):
    """``GET /server_info``."""

    vllm_config: VllmConfig


class Prefetch(msgspec.Struct):
    """How far one worker is with a version that it pulls in advance, and how long that took, once it is over."""

    version: int
    state: Literal["pulling", "ready", "failed"]
    error: str = ""
    seconds: float = 0.0


class Prefetches(msgspec.Struct):
    """``POST /collective_rpc``, of all workers."""

    results: list[Prefetch]


class EngineLoad(msgspec.Struct, frozen=True):
    """What a server is busy with, as of its own figures.

    ``cache_usage`` is the share of the key-value cache in use, 0 to 1; ``preemptions`` and ``generated_tokens`` count
    from the server's start. Of a server with several engines, sums, and the mean of ``cache_usage``.
    """

    running_requests: int
    waiting_requests: int
    cache_usage: float
    preemptions: int
    generated_tokens: int


class _Said(msgspec.Struct):
    message: str


class _Problem(msgspec.Struct):
    error: _Said | str | None = None
    detail: str | None = None


_METRIC = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total"
    rb"|generation_tokens_total)(?:\{[^}\n]*\})? ([0-9.eE+-]+)$",
    re.MULTILINE,
)


class VllmApi:
    """Calls to one server. ``url`` is ``http://host:port`` or ``unix:/path/of/socket``; make it in a running loop."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        parts = urlsplit(url)
        connector: aiohttp.BaseConnector
        if parts.scheme == "unix":
            self._root = "http://localhost"
            connector = aiohttp.UnixConnector(parts.path, limit=0, keepalive_timeout=KEEP_ALIVE_S)
        else:
            self._root = url.rstrip("/")
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        # Deadlines are set around calls, and no proxy of the environment is between a controller and its engines.
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CALL_TIMEOUT_S),
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
        )

    async def close(self) -> None:
        """Hang up. Idempotent."""
        await self._session.close()

    async def health(self) -> None:
        """Succeeds if the server and the engine in it are alive."""
        await self._call("GET", "/health")

    async def version(self) -> str:
        """The version of vLLM."""
        return (await self._call_for(Version, "GET", "/version")).version

    async def models(self) -> list[ModelCard]:
        """The models that it offers; the first is the one it was started with."""
        return (await self._call_for(ModelList, "GET", "/v1/models")).data

    async def server_info(self) -> ServerInfo:
        """Its settings."""
        return await self._call_for(
            ServerInfo, "GET", "/server_info", params={"config_format": "json"}, timeout_s=DESCRIBE_TIMEOUT_S
        )

    async def tokenize(self, model: str, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return (await self._call_for(Tokenized, "POST", "/tokenize", body)).tokens

    async def load(self) -> EngineLoad:
        """What it is busy with."""
        body = await self._call("GET", "/metrics")
        found: dict[bytes, list[float]] = {}
        for match in _METRIC.finditer(body):
            found.setdefault(match[1], []).append(float(match[2]))
        try:
            usage = found[b"kv_cache_usage_perc"]
            return EngineLoad(
                running_requests=round(sum(found[b"num_requests_running"])),
                waiting_requests=round(sum(found[b"num_requests_waiting"])),
                cache_usage=sum(usage) / len(usage),
                preemptions=round(sum(found[b"num_preemptions_total"])),
                generated_tokens=round(sum(found[b"generation_tokens_total"])),
            )
        except KeyError as missing:
            raise EngineReplyError(f"{self.name} has no vllm:{missing.args[0].decode()} in /metrics") from None

    async def abort(self, server_id: str) -> None:
        """End a request, if the server knows it by now."""
        await self._call("POST", "/abort_requests", {"request_ids": [server_id]})

    async def pause(self) -> None:
        """Stop decoding after the step that is running; requests keep their cache."""
        await self._call("POST", "/pause", params={"mode": "keep"})

    async def resume(self) -> None:
        """Go on decoding."""
        await self._call("POST", "/resume")

    async def is_paused(self) -> bool:
        """Whether decoding is stopped."""
        return (await self._call_for(PauseState, "GET", "/is_paused")).is_paused

    async def weight_label(self) -> str:
        """The name of the weights that it serves."""
        return (await self._call_for(WeightInfo, "GET", "/weight_info")).weight_version

    async def prefetch(self, source: dict[str, int | str]) -> list[Prefetch]:
        """Let every worker pull a version while it goes on generating; says how far each is."""
        body = {"method": "staleflow_prefetch", "kwargs": {"source": source}}
        return (await self._call_for(Prefetches, "POST", "/collective_rpc", body)).results

    async def init_weight_transfer(self, info: Mapping[str, object]) -> None:
        """Have every worker join a group that weights are broadcast in; answered when all have."""
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": info}, timeout_s=JOIN_TIMEOUT_S)

    async def shutdown_weight_transfer(self) -> None:
        """Have every worker leave that group, if it is in one."""
        await self._call("POST", "/shutdown_weight_transfer_engine")

    async def name_weights(self, label: str) -> None:
        """Change the name of the weights that it serves, and nothing else."""
        await self._call("POST", "/update_weight_version", {"new_version": label})

    async def start_weight_update(self) -> None:
        """Announce new weights."""
        await self._call("POST", "/start_weight_update")

    async def update_weights(self, info: Mapping[str, object]) -> None:
        """Say what the new weights are, in the words of the server's weight transfer; answered when it has them."""
        await self._call("POST", "/update_weights", {"update_info": info}, timeout_s=TRANSFER_TIMEOUT_S)

    async def finish_weight_update(self, label: str | None) -> None:
        """Swap the new weights in, under this name; without a name and without new weights, end a broken-off update."""
        await self._call("POST", "/finish_weight_update", {"weight_version": label})

    @asynccontextmanager
    async def answering(self, path: str, body: object) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a request and enter once the answer has begun; the caller sets the deadline."""
        async with self._response("POST", path, body) as response:
            yield response

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: dict[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout_s), self._response(method, path, body, params) as response:
                return await response.read()
        except TimeoutError:
            raise EngineTimeoutError(
                f"{self.name} did not answer {method} {self.url}{path} within {timeout_s:g} s"
            ) from None

    async def _call_for(
        self,
        shape: type[Answer],
        method: str,
        path: str,
        body: object = None,
        *,
        params: dict[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Answer:
        answer = await self._call(method, path, body, params=params, timeout_s=timeout_s)
        try:
            return msgspec.json.decode(answer, type=shape)
        except msgspec.MsgspecError as error:
            raise EngineReplyError(
                f"{self.name} answered {method} {self.url}{path} with something else than was expected: {error}; "
                f"it begins {_beginning(answer)}"
            ) from error

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: object, params: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        where = f"{method} {self.url}{path}"
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self._root + path, data=data, params=params, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    said = _said(await response.read())
                    raise EngineStatusError(
                        f"{self.name} answered {where} with {response.status}: {said}", response.status
                    )
                yield response
        except aiohttp.ClientPayloadError as error:
            raise EngineReplyError(f"{self.name} broke off its answer to {where}") from error
        except aiohttp.ClientConnectorError as error:
            # What the operating system says; of a name that cannot be resolved, what the resolver says.
            code = error.errno or 0
            why = os.strerror(code) if code > 0 else error.strerror
            raise EngineError(f"{self.name} cannot be reached at {self.url}: {why}") from error
        except aiohttp.ClientResponseError as error:
            raise EngineReplyError(f"what answers {where} does not speak HTTP as it should: {error.message}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineError(f"{self.name} hung up on {where}: {error or type(error).__name__}") from error


def _said(body: bytes) -> str:
    """The message in the body of an HTTP error."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except msgspec.MsgspecError:
        return _beginning(body)
    match problem:
        case _Problem(error=_Said(message)):
            return message
        case _Problem(error=str(message)) | _Problem(detail=str(message)):
            return message
        case _:
            return _beginning(body)


def _beginning(body: bytes) -> str:
    return repr(body[:SHOWN_CHARACTERS].decode(errors="replace"))
