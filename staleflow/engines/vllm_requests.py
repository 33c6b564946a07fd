"""Requests in flight on one vLLM server: asked, answered, aborted, and the late answers that nobody waits for.

Data flow. ``generate`` gives the request an id that the server has never seen and starts a task that posts it. The
answer is read, parsed (a large one in a thread, with the interpreter lock released) and checked against what was asked.
A caller that goes away leaves the task behind to abort the request on the server, so that it costs nothing more.

Invariant: every request that was sent ends: with its answer, with an error, or dropped and counted in ``late_answers``
because nobody waits for it any more. An answer reaches the request whose id it carries, or none.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import ClientResponse

from staleflow._core import decode_reply
from staleflow.engines.vllm_api import VllmApi
from staleflow.errors import EngineError, EngineGoneError, EngineReplyError, EngineStatusError, EngineTimeoutError
from staleflow.types import FinishReason, GenerateRequest, Generation

TOKENS_PATH = "/inference/v1/generate"
COMPLETIONS_PATH = "/v1/completions"
CONCURRENT_READS = 2
"""Answers that are read and parsed at a time. The others wait in the sockets' buffers: were all read at once, one turn
of the event loop would have to look after each of them."""
SMALL_REPLY_BYTES = 1 << 14
"""A reply of so many is parsed in less time than it takes to hand it to a thread and back."""
READ_TIMEOUT_S = 60.0
"""For an answer that has begun: a server sends it as a whole, and it keeps others from being read."""
FIRST_ABORT_WAIT_S = 0.05
LONGEST_ABORT_WAIT_S = 1.0
ABORT_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 10.0
NO_ENGINE = 503
"""What ``/health`` answers when the server is up and the engine in it is dead."""
SERVER_FAULT = 500
"""The lowest HTTP status for which the server is to blame."""
INITIAL_LABEL = "default"
"""The name of the weights that a vLLM server was started with, as long as nobody gave it others."""
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "interrupted"}


def label_of(version: int) -> str:
    """The name under which a server is given the weights of a version."""
    return str(version)


def version_of(label: str) -> int:
    """The version of weights by the name that a server gives them; raises :class:`EngineReplyError` if it has none."""
    if label == INITIAL_LABEL:
        return 0
    if not (label.isascii() and label.isdigit() and len(label) < 19):
        raise EngineReplyError(f"weights named {label!r} are of no policy version")
    return int(label)


class _Exchange:
    """One request, and who waits for its answer."""

    def __init__(self, request: GenerateRequest, server_id: str) -> None:
        self.request = request
        self.server_id = server_id
        """The id by which the server knows the request, as it repeats it in its answer."""
        self.abort_id = server_id
        self.outcome: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    def ended(self, task: asyncio.Task[None]) -> None:
        """Leave nobody waiting, whatever has ended the task that was to bring the answer."""
        if self.outcome.done():
            return
        error = None if task.cancelled() else task.exception()
        self.outcome.set_exception(error or EngineGoneError(f"request {self.request.request_id} was dropped"))

    def fail(self, error: EngineError) -> None:
        """Stop waiting for the answer, and hang up."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
        if self.task is not None:
            self.task.cancel()


class VllmRequests:
    """All requests to one server.

    Args:
        api: the server.
        model: the name under which it offers the model.
        temperature: of sampling.
        timeout_s: after which a request is given up.
        served: the version that the server has confirmed last.
    """

    def __init__(
        self, api: VllmApi, *, model: str, temperature: float, timeout_s: float, served: Callable[[], int]
    ) -> None:
        self.late_answers = 0
        self.reports_versions = True
        """Whether the server takes tokens and reports the version of each; otherwise it completes prompts."""
        self._api = api
        self._model = model
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._served = served
        self._exchanges: dict[str, _Exchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._reading = asyncio.Semaphore(CONCURRENT_READS)
        self._parser = ThreadPoolExecutor(1, thread_name_prefix=f"{api.name}-replies")
        self._run = secrets.token_hex(4)
        self._sent = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Ask the server. Cancelling the call aborts the request there."""
        if request.request_id in self._exchanges:
            raise EngineError(f"{self._api.name} is still at work on a request {request.request_id}")
        exchange = self._send(request)
        self._exchanges[request.request_id] = exchange
        try:
            return await exchange.outcome
        except asyncio.CancelledError:
            self._spawn(self._let_go(exchange))
            raise
        finally:
            del self._exchanges[request.request_id]

    async def interrupt(self, request_id: str) -> None:
        """Have a request answered with what it has sampled so far; returns once it is, or has failed."""
        exchange = self._exchanges.get(request_id)
        if exchange is not None:
            await self._let_go(exchange)

    def fail(self, why: str) -> None:
        """Give all requests up, because the engine is gone."""
        for exchange in self._exchanges.values():
            exchange.fail(EngineGoneError(why))

    async def close(self) -> None:
        """Hang up on everything that is left. Idempotent."""
        self.fail(f"{self._api.name} was stopped")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._parser.shutdown(wait=False)

    def _send(self, request: GenerateRequest) -> _Exchange:
        self._sent += 1
        own_id = f"{self._run}.{self._sent}.{request.request_id}"
        if self.reports_versions:
            exchange = _Exchange(request, f"generate-tokens-{own_id}")
            exchange.task = self._spawn(self._answer(exchange, TOKENS_PATH, self._tokens_body(request, own_id)))
        else:
            exchange = _Exchange(request, f"cmpl-{own_id}")
            # One request may ask for several prompts; each has an id of its own, which is the one to abort.
            exchange.abort_id = f"{exchange.server_id}-0"
            exchange.task = self._spawn(self._answer(exchange, COMPLETIONS_PATH, self._prompt_body(request, own_id)))
        exchange.task.add_done_callback(exchange.ended)
        return exchange

    def _tokens_body(self, request: GenerateRequest, own_id: str) -> dict[str, Any]:
        return {
            "request_id": own_id,
            "model": self._model,
            "token_ids": request.token_ids,
            "sampling_params": self._sampling(request) | {"logprobs": 0, "detokenize": False},
            "cache_salt": self._cache_salt(),
        }

    def _prompt_body(self, request: GenerateRequest, own_id: str) -> dict[str, Any]:
        return self._sampling(request) | {
            "request_id": own_id,
            "model": self._model,
            "prompt": request.token_ids,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "cache_salt": self._cache_salt(),
        }

    def _sampling(self, request: GenerateRequest) -> dict[str, Any]:
        """Everything is said, because what is not said the server takes from the model's generation_config.json."""
        return {
            "max_tokens": request.max_new_tokens,
            "temperature": self._temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
        } | ({"prompt_logprobs": 0} if request.prompt_logprobs else {})

    def _cache_salt(self) -> str:
        """Keeps the prompts of one version from being continued on the cached keys and values of another."""
        return f"version-{self._served()}"

    async def _answer(self, exchange: _Exchange, path: str, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                generation = await self._ask(exchange, path, body)
        except TimeoutError:
            who = f"{self._api.name} did not answer request {exchange.request.request_id}"
            self._fail(exchange, EngineTimeoutError(f"{who} within {self._timeout_s:g} s (request_timeout_s)"))
        except EngineError as error:
            self._fail(exchange, error if await self._lives_after(error) else self._gone(exchange, error))
        else:
            if exchange.outcome.done():
                self.late_answers += 1
            else:
                exchange.outcome.set_result(generation)

    def _fail(self, exchange: _Exchange, error: EngineError) -> None:
        if not exchange.outcome.done():
            exchange.outcome.set_exception(error)

    async def _lives_after(self, error: EngineError) -> bool:
        """Whether the failure of a request is its own, and not the first sign that the server is dead."""
        if isinstance(error, EngineStatusError) and error.status < SERVER_FAULT:
            return True
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._api.health()
        except EngineStatusError as answer:
            return answer.status != NO_ENGINE
        except EngineError:
            return False
        except TimeoutError:
            # The watch over the engine decides how long it may be silent.
            return True
        return True

    def _gone(self, exchange: _Exchange, error: EngineError) -> EngineGoneError:
        return EngineGoneError(f"{self._api.name} died with request {exchange.request.request_id} unanswered: {error}")

    async def _ask(self, exchange: _Exchange, path: str, body: dict[str, Any]) -> Generation:
        lowest = None if self.reports_versions else self._served()
        async with self._sending:
            # One request in a turn of the loop: a hundred at once would keep it from everything else.
            await asyncio.sleep(0)
        async with self._api.answering(path, body) as response, self._reading:
            reply = await self._read(exchange, response)
            parse = partial(parse_reply, self._api.name, exchange.request, exchange.server_id, reply, lowest)
            if len(reply) <= SMALL_REPLY_BYTES:
                generation = parse()
            else:
                generation = await asyncio.get_running_loop().run_in_executor(self._parser, parse)
        if lowest is not None and (now := version_of(await self._api.weight_label())) < lowest:
            raise EngineReplyError(
                f"{self._api.name} serves version {now} after it had confirmed {lowest}: the tokens of request "
                f"{exchange.request.request_id} may be of older weights"
            )
        return generation

    async def _read(self, exchange: _Exchange, response: ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await response.read()
        except TimeoutError:
            raise EngineReplyError(
                f"{self._api.name} began to answer request {exchange.request.request_id} and did not finish within "
                f"{READ_TIMEOUT_S:g} s"
            ) from None

    async def _let_go(self, exchange: _Exchange) -> None:
        """Abort a request until it is answered: the server does not know yet what it has only just been sent."""
        assert exchange.task is not None
        wait_s = FIRST_ABORT_WAIT_S
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while not exchange.task.done():
                    # Whatever keeps this from being heard, trying again is all there is to do.
                    with suppress(EngineError):
                        await self._api.abort(exchange.abort_id)
                    await asyncio.wait({exchange.task}, timeout=wait_s)
                    wait_s = min(2 * wait_s, LONGEST_ABORT_WAIT_S)
        except TimeoutError:
            request_id = exchange.request.request_id
            exchange.fail(
                EngineTimeoutError(f"{self._api.name} did not let go of request {request_id} in {ABORT_TIMEOUT_S:g} s")
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def parse_reply(name: str, request: GenerateRequest, server_id: str, body: bytes, lowest: int | None) -> Generation:
    """Read a server's answer; raises :class:`EngineReplyError` if it is none to this request. Runs in any thread.

    ``lowest`` is given for a server that does not report versions: no token is older, so that each counts as this one.
    """
    try:
        reply = decode_reply(body, request.token_ids if request.prompt_logprobs else None)
        if reply.request_id != server_id:
            raise EngineReplyError(f"it answers request {reply.request_id!r}, not {server_id!r}")
        finish_reason = FINISH_REASONS.get(reply.finish_reason)
        if finish_reason is None:
            raise EngineReplyError(f"it ends because of {reply.finish_reason!r}")
        token_ids = reply.token_ids
        versions = _spread(reply.weight_versions, len(token_ids)) if lowest is None else [lowest] * len(token_ids)
    except EngineReplyError as error:
        raise EngineReplyError(
            f"{name} gave request {request.request_id} an answer that is refused: {error}"
        ) from error
    return Generation(request.request_id, token_ids, reply.logprobs, versions, finish_reason, reply.prompt_logprobs)


def _spread(runs: list[tuple[str, int, int]] | None, tokens: int) -> list[int]:
    """One version for each token."""
    if runs is None:
        if tokens:
            raise EngineReplyError("it does not report the weight_versions of its tokens")
        return []
    versions: list[int] = []
    for label, start, end in runs:
        if not (start == len(versions) and start <= end <= tokens):
            break
        versions += [version_of(label)] * (end - start)
    if len(versions) != tokens:
        raise EngineReplyError(f"the weight_versions {runs} are not those of {tokens} tokens")
    return versions
