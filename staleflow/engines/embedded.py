"""The embedded engine, controller side: a child process on this machine that runs transformers.

The child (``embedded_server``) holds the model and its continuous batching loop; this file holds the futures of
the requests in flight. The messages below are the whole wire.
"""

import asyncio
import math
import random
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec

from staleflow.engines.base import load_tokenizer
from staleflow.errors import ConfigError, EngineError
from staleflow.process import Child
from staleflow.types import GenerateRequest, Generation

START_TIMEOUT_S = 300.0
UPDATE_TIMEOUT_S = 120.0


class Setup(msgspec.Struct, tag=True, frozen=True):
    """First message to the child: what to load and how to run it."""

    model: str
    capacity: int
    cache_tokens: int
    temperature: float
    threads: int
    seed: int


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Queue one request."""

    request: GenerateRequest


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Drop one request; no answer follows."""

    request_id: str


class Interrupt(msgspec.Struct, tag=True, frozen=True):
    """Let go of one request; its answer follows, unless it is on its way already."""

    request_id: str


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Swap in the weights of ``version`` from a folder of safetensors files."""

    version: int
    weights: str


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Stop decoding after the current step."""


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Go on decoding."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded and decoding can begin."""

    max_model_tokens: int
    vocabulary: int | None = None


class Generated(msgspec.Struct, tag=True, frozen=True):
    """A request has ended."""

    generation: Generation


class GenerateFailed(msgspec.Struct, tag=True, frozen=True):
    """A request could not be served."""

    request_id: str
    error: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """The oldest update, pause or resume not yet confirmed has taken effect; ``version`` is the one now served."""

    version: int


ToChild: TypeAlias = Setup | Generate | Cancel | Interrupt | UpdateWeights | Pause | Resume
FromChild: TypeAlias = Ready | Generated | GenerateFailed | Done


class EmbeddedEngine:
    """Transformers continuous batching in a child process; any Hugging Face causal LM folder loads.

    Args:
        model: folder with ``config.json`` and safetensors weights.
        capacity: requests decoded at once.
        cache_tokens: size of the key-value cache in tokens, shared by all running requests.
        temperature: divides the logits before sampling; the recorded logprobs are those after division. Give the
            trainer the same value.
        threads: torch threads of the child.
        seed: of the child's sampler, together with the engine's name: two engines never sample in step.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        capacity: int = 128,
        cache_tokens: int = 32_768,
        temperature: float = 1.0,
        threads: int = 1,
        seed: int = 0,
    ) -> None:
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"model {str(model)!r}: no such Hugging Face folder (it has no config.json)")
        for name, value in (("capacity", capacity), ("cache_tokens", cache_tokens), ("threads", threads)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not 0 < temperature < math.inf:
            raise ConfigError(f"temperature is {temperature}; it must be above 0 and finite")
        self.model = Path(model)
        self.tokenizer = load_tokenizer(self.model)
        self.settings = Setup(
            model=str(model),
            capacity=capacity,
            cache_tokens=cache_tokens,
            temperature=temperature,
            threads=threads,
            seed=seed,
        )
        self._max_model_tokens = 0
        self._vocabulary: int | None = None
        self._child: Child[FromChild] | None = None
        self._generations: dict[str, asyncio.Future[Generation]] = {}
        # The child confirms commands in the order in which they were sent, cancelled ones included.
        self._unconfirmed: deque[asyncio.Future[int]] = deque()

    @property
    def capacity(self) -> int:
        """How many requests run at once."""
        return self.settings.capacity

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence the model and its cache can hold; known after ``start``."""
        return self._max_model_tokens

    @property
    def vocabulary(self) -> int | None:
        """How many token ids the model has; known after ``start``."""
        return self._vocabulary

    async def start(self, name: str, log_folder: Path) -> None:
        """Spawn the child and wait until the model is loaded; raises :class:`EngineError` with its last log lines."""
        self._generations.clear()
        self._unconfirmed.clear()
        self._child = await Child.spawn(
            name,
            "staleflow.engines.embedded_server",
            log_path=log_folder / f"{name}.log",
            receives=FromChild,  # type: ignore[arg-type]
            error=EngineError,
        )
        seed = random.Random(f"{self.settings.seed}/{name}").getrandbits(32)
        await self._child.send(msgspec.structs.replace(self.settings, seed=seed))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await self._child.receive()
        except TimeoutError:
            raise EngineError(f"{name} did not load {self.model} within {START_TIMEOUT_S:.0f} s") from None
        if not isinstance(ready, Ready):
            raise EngineError(f"{name} answered {type(ready).__name__} before Ready")
        self._max_model_tokens = ready.max_model_tokens
        self._vocabulary = ready.vocabulary

    async def run(self) -> None:
        """Deliver the child's answers until cancelled; raises :class:`EngineError` when it dies."""
        child = self._running()
        while True:
            message = await child.receive()
            match message:
                case Generated(generation):
                    self._resolve(generation)
                case GenerateFailed(request_id, error):
                    future = self._generations.pop(request_id, None)
                    if future is not None and not future.done():
                        future.set_exception(EngineError(f"{child.name} could not serve {request_id}: {error}"))
                case Done(version):
                    if not self._unconfirmed:
                        raise EngineError(f"{child.name} confirmed a command that was not given")
                    confirmed = self._unconfirmed.popleft()
                    if not confirmed.done():
                        confirmed.set_result(version)
                case Ready():
                    raise EngineError(f"{child.name} sent Ready twice")
                case _:
                    assert_never(message)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt; see :class:`staleflow.engines.base.Engine`."""
        child = self._running()
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._generations[request.request_id] = future
        try:
            # Of a dead child `run` tells, once. To each request it is silent: none has failed.
            with suppress(EngineError):
                await child.send(Generate(request))
            return await future
        except asyncio.CancelledError:
            # The reply may already be on the wire; without its future it is dropped on arrival.
            if self._generations.pop(request.request_id, None) is not None:
                # A dead child needs no cancelling, and its error has its own way out.
                with suppress(EngineError):
                    await child.send(Cancel(request.request_id))
            raise

    async def interrupt(self, request_id: str) -> None:
        """Let go of a request; see :class:`staleflow.engines.base.Engine`."""
        # As with `generate`, of a dead child `run` tells.
        with suppress(EngineError):
            await self._running().send(Interrupt(request_id))

    async def update_weights(self, version: int, weights: Path) -> int:
        """Swap weights between two decode steps; returns the version that the child confirms."""
        return await self._command(UpdateWeights(version, str(weights)))

    async def pause(self) -> None:
        """Stop decoding after the current step."""
        await self._command(Pause())

    async def resume(self) -> None:
        """Go on decoding."""
        await self._command(Resume())

    async def stop(self) -> None:
        """End the child. Idempotent."""
        if self._child is not None:
            await self._child.stop()

    async def _command(self, message: UpdateWeights | Pause | Resume) -> int:
        child = self._running()
        confirmed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._unconfirmed.append(confirmed)
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                # As with `generate`, of a dead child `run` tells.
                with suppress(EngineError):
                    await child.send(message)
                return await confirmed
        except TimeoutError:
            what = type(message).__name__
            raise EngineError(f"{child.name} did not confirm {what} within {UPDATE_TIMEOUT_S:.0f} s") from None

    def _resolve(self, generation: Generation) -> None:
        future = self._generations.pop(generation.request_id, None)
        if future is not None and not future.done():
            future.set_result(generation)

    def _running(self) -> Child[FromChild]:
        if self._child is None:
            raise EngineError(f"the engine of {self.model} was not started")
        return self._child
