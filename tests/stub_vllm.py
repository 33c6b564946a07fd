"""A vLLM server without a model: the endpoints that the engine uses, with scripted answers and faults.

It speaks over a Unix socket in the test's own event loop, where nothing is ever on its way: on a virtual clock every
byte that was sent has arrived before time goes on.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web

from staleflow.engines.vllm_plugin import BACKEND, WORKER_EXTENSION

Fault: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""What happens instead of an answer; the answer follows all the same if it returns None."""

TOKEN_S = 0.01
TOKENS = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


def status(code: int, message: str = "out of order") -> Fault:
    """Answer with an HTTP error, as vLLM words it."""

    async def fault(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "type": "x", "code": code}}, status=code)

    return fault


def raw(body: bytes) -> Fault:
    """Answer with these bytes."""

    async def fault(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    return fault


async def silence(request: web.Request) -> web.StreamResponse | None:
    """Never answer."""
    await asyncio.Event().wait()
    return None


async def hang_up(request: web.Request) -> web.StreamResponse:
    """Close the connection instead."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def half(request: web.Request) -> web.StreamResponse:
    """Promise more bytes than are sent, then close the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"request_id": ')
    assert request.transport is not None
    request.transport.close()
    return response


async def stall(request: web.Request) -> web.StreamResponse:
    """Send the beginning of an answer, and nothing more."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"request_id": ')
    await asyncio.Event().wait()
    return response


class _Request:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.labels: list[str] = []
        self.aborted = asyncio.Event()


class StubVllm:
    """The server; all of its attributes may be changed by a test at any time."""

    def __init__(self) -> None:
        self.version = "0.32.0"
        self.logprobs_mode = "processed_logprobs"
        self.weight_transfer: dict[str, str] | None = {"backend": BACKEND}
        self.worker_extension = WORKER_EXTENSION
        self.parallel = {"world_size": 1, "data_parallel_size": 1}
        self.root = "/elsewhere/model"
        self.label = "default"
        self.paused = False
        self.update_active = False
        self.pulled: list[str] = ["ready"]
        """States of the prefetch, one for each time it is asked for; the last one stays."""
        self.prefetch_error = ""
        self.unscheduled_s = 0.0
        """Time until a request that was sent is known to an abort."""
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda reply: reply
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        """By path; each happens once, in order."""
        self.always: dict[str, Fault] = {}
        """By path; happens each time once ``faults`` are used up."""
        self.calls: list[tuple[str, Any]] = []
        """Path and body of every call."""
        self.running: dict[str, _Request] = {}
        self.aborted_unknown = 0
        self.tokenize: Callable[[str], list[int]] = lambda text: []
        self.going_on = asyncio.Event()
        self.going_on.set()

    @asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[str]:
        """Serve at the URL that this yields."""
        app = web.Application(middlewares=[self._middleware])
        for path in (TOKENS, COMPLETIONS):
            app.router.add_post(path, self._generate)
        for path in (
            "/tokenize",
            "/abort_requests",
            "/pause",
            "/resume",
            "/collective_rpc",
            "/init_weight_transfer_engine",
            "/shutdown_weight_transfer_engine",
            "/update_weight_version",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
        ):
            app.router.add_post(path, getattr(self, f"_{path[1:]}"))
        for path in ("/health", "/version", "/is_paused", "/weight_info", "/server_info", "/metrics"):
            app.router.add_get(path, getattr(self, f"_{path[1:]}"))
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        socket = folder / "vllm.socket"
        await web.UnixSite(runner, str(socket)).start()
        try:
            yield f"unix:{socket}"
        finally:
            await runner.cleanup()

    def paths(self, *wanted: str) -> list[str]:
        """The calls to these paths, in order; to all if none is given."""
        return [path for path, _ in self.calls if not wanted or path in wanted]

    def bodies(self, path: str) -> list[Any]:
        """What the calls to a path said."""
        return [body for called, body in self.calls if called == path]

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else dict(request.query)
        self.calls.append((request.path, body))
        faults = self.faults[request.path]
        fault = faults.pop(0) if faults else self.always.get(request.path)
        response = None if fault is None else await fault(request)
        return await handler(request) if response is None else response

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens_in = request.path == TOKENS
        server_id = f"generate-tokens-{body['request_id']}" if tokens_in else f"cmpl-{body['request_id']}"
        sampling = body["sampling_params"] if tokens_in else body
        prompt = body["token_ids"] if tokens_in else body["prompt"]
        await asyncio.sleep(self.unscheduled_s)
        running = self.running[server_id if tokens_in else f"{server_id}-0"] = _Request()
        try:
            finish_reason = await self._decode(running, sampling["max_tokens"])
        finally:
            self.running = {key: value for key, value in self.running.items() if value is not running}
        reply = reply_of(server_id, running.token_ids, running.labels, finish_reason, tokens_in=tokens_in)
        if "prompt_logprobs" in sampling:
            known = [None, *({str(token): {"logprob": -0.5, "rank": 1}} for token in prompt[1:])]
            (reply if tokens_in else reply["choices"][0])["prompt_logprobs"] = known
        return web.json_response(self.answer(reply))

    async def _decode(self, running: _Request, max_tokens: int) -> str:
        for token in range(max_tokens):
            step = asyncio.ensure_future(self._step())
            aborted = asyncio.ensure_future(running.aborted.wait())
            await asyncio.wait({step, aborted}, return_when=asyncio.FIRST_COMPLETED)
            step.cancel()
            aborted.cancel()
            if running.aborted.is_set():
                return "abort"
            running.token_ids.append(token)
            running.labels.append(self.label)
        return "length"

    async def _step(self) -> None:
        await asyncio.sleep(TOKEN_S)
        await self.going_on.wait()

    async def _abort_requests(self, request: web.Request) -> web.StreamResponse:
        wanted = (await request.json())["request_ids"]
        for server_id in wanted:
            if server_id in self.running:
                self.running[server_id].aborted.set()
            else:
                self.aborted_unknown += 1
        return web.json_response({"status": "aborted", "aborted": len(wanted)})

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        assert request.query["mode"] == "keep"
        self.paused = True
        self.going_on.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        self.paused = False
        self.going_on.set()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"is_paused": self.paused})

    async def _collective_rpc(self, request: web.Request) -> web.StreamResponse:
        source = (await request.json())["kwargs"]["source"]
        state = self.pulled.pop(0) if len(self.pulled) > 1 else self.pulled[0]
        progress = {"version": source["version"], "state": state, "error": self.prefetch_error}
        return web.json_response({"results": [progress | {"pulled_bytes": 1, "total_bytes": 2}]})

    async def _init_weight_transfer_engine(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "Weight transfer initialized"})

    async def _shutdown_weight_transfer_engine(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "Weight transfer shut down"})

    async def _update_weight_version(self, request: web.Request) -> web.StreamResponse:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def _start_weight_update(self, request: web.Request) -> web.StreamResponse:
        assert self.paused, "weights are written while requests are decoded"
        if self.update_active:
            return await _refusal("a weight update is already active")
        self.update_active = True
        return web.json_response({"message": "Weight update started"})

    async def _update_weights(self, request: web.Request) -> web.StreamResponse:
        assert self.update_active
        return web.json_response({"message": "Weights updated"})

    async def _finish_weight_update(self, request: web.Request) -> web.StreamResponse:
        assert self.update_active
        self.update_active = False
        label = (await request.json())["weight_version"]
        self.label = self.label if label is None else label
        return web.json_response({"message": "Weight update finished"})

    async def _weight_info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"weight_version": self.label})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "served", "root": self.root, "max_model_len": 512}]})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["add_special_tokens"] is False
        return web.json_response({"tokens": self.tokenize(body["prompt"])})

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        assert request.query["config_format"] == "json"
        config = {
            "model_config": {"logprobs_mode": self.logprobs_mode, "model": "served"},
            "parallel_config": {"worker_extension_cls": self.worker_extension} | self.parallel,
            "weight_transfer_config": self.weight_transfer,
        }
        return web.json_response({"vllm_config": config, "vllm_env": {}})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        figures = {
            "num_requests_running": 2,
            "num_requests_waiting": 3,
            "num_requests_waiting_by_reason": 9,
            "kv_cache_usage_perc": 0.25,
            "num_preemptions_total": 4,
            "num_preemptions_created": 1.8e9,
            "generation_tokens_total": 1.5e6,
        }
        lines = [
            f'vllm:{name}{{engine="{engine}",model_name="served"}} {value}'
            for name, value in figures.items()
            for engine in (0, 1)
        ]
        return web.Response(text="\n".join(["# HELP vllm:num_requests_running x", *lines, ""]))


async def _refusal(message: str) -> web.StreamResponse:
    return web.json_response({"error": {"message": message, "type": "InternalServerError", "code": 500}}, status=500)


def reply_of(
    server_id: str, token_ids: list[int], labels: list[str], finish_reason: str, *, tokens_in: bool = True
) -> dict[str, Any]:
    """What vLLM sends for these tokens; the logprob of token ``n`` is ``-n / 10``."""
    logprobs = [-token / 10 for token in token_ids]
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "stop_reason": None, "token_ids": token_ids}
    if not tokens_in:
        choice |= {"text": "", "logprobs": {"token_logprobs": logprobs, "tokens": [], "top_logprobs": []}}
        return {"id": server_id, "object": "text_completion", "model": "served", "choices": [choice]}
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": [{"token_id": token, "logprob": logprob}]}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    starts = [index for index, label in enumerate(labels) if index == 0 or label != labels[index - 1]]
    runs = [
        {"version": labels[start], "start": start, "end": end}
        for start, end in itertools.pairwise([*starts, len(labels)])
    ]
    choice |= {"logprobs": {"content": content}, "weight_versions": runs}
    return {"request_id": server_id, "model": "served", "prompt_logprobs": None, "choices": [choice]}
