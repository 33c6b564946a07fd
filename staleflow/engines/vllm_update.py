"""How a vLLM server is given new weights: prepared in advance, swapped in while it pauses, confirmed, resumed.

Data flow. What can be done while the server generates is done first; usually its workers pull the version. Then it is
paused and seen to be, the update is announced, handed over (``vllm_carriers``) and finished, the server says what it
serves, and is resumed and seen to be.

Invariants. Weights are written only while nothing decodes. A pause ends, whatever happens in it: resuming is tried
again until it is confirmed or the engine is given up. The version served is the last one that the server confirmed. An
update that fails before anything of the model is changed leaves it as it was; one that fails later, and is not
confirmed all the same, ends the engine, since its weights are then unknown.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from staleflow.engines.vllm_api import VllmApi
from staleflow.engines.vllm_carriers import Carrier
from staleflow.engines.vllm_requests import label_of, version_of
from staleflow.errors import EngineError, EngineReplyError, EngineStatusError, EngineTimeoutError

RESUME_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
RETRY_S = 0.25
BROADCASTING = "broadcasting-"
"""Begins the name of weights that are being overwritten; what has such a name may be half of a version."""
LEFT_OPEN = "already active"
"""What a server says of an update that its client has broken off."""


class WeightUpdates:
    """The weights of one server.

    Args:
        api: the server.
        carrier: gets weights into it.
        timeout_s: for pulling a version, and again for swapping it in.
        die: told the reason when the engine cannot be believed any more.
    """

    def __init__(self, api: VllmApi, carrier: Carrier, *, timeout_s: float, die: Callable[[EngineError], None]) -> None:
        self.version = 0
        """The last one that the server has confirmed."""
        self.lock = asyncio.Lock()
        """Held while the server pauses or what it serves may change."""
        self.unknown = False
        """Whether a swap was begun and neither confirmed nor seen not to have happened."""
        self._api = api
        self._carrier = carrier
        self._timeout_s = timeout_s
        self._die = die
        self._dead = False
        self._held = False
        self._may_be_paused = False

    async def adopt(self, before: "WeightUpdates | None") -> None:
        """Find out what a server that is connected to serves; ``before`` is of the last connection to it, if any.

        Raises :class:`EngineError` if that is neither what it was started with nor what it had confirmed.
        """
        label = await self._api.weight_label()
        if label.startswith(BROADCASTING):
            raise EngineError(
                f"{self._api.name} at {self._api.url} may hold half of a version, since a broadcast to it has failed: "
                "restart that server, so that it serves the initial weights"
            )
        version = version_of(label)
        confirmed = before is not None and not before.unknown and label == label_of(before.version)
        if version != 0 and not confirmed:
            raise EngineError(
                f"{self._api.name} at {self._api.url} serves weights {label!r} of another run, or of an update "
                "that was not confirmed: restart that server, so that it serves the initial weights"
            )
        self.version = version
        if await self._api.is_paused():
            # Whoever has paused it died before resuming it.
            self._may_be_paused = True
            await self._resume()
        await self._carrier.open()

    async def update(self, version: int, folder: Path) -> int:
        """Let the server serve a version; returns it once the server has confirmed it."""
        async with self.lock:
            async with self._deadline("prepare", version):
                await self._carrier.prepare(version, folder)
            async with self._pausing(), self._deadline("swap in", version):
                await self._swap(version, folder)
            return self.version

    async def pause(self) -> None:
        """Stop decoding until :meth:`resume`; if that fails, the server goes on decoding."""
        async with self.lock:
            self._held = True
            try:
                await self._pause()
            except BaseException:
                self._held = False
                await self._resume()
                raise

    async def resume(self) -> None:
        """Go on decoding; returns once the server says that it does. Idempotent."""
        async with self.lock:
            self._held = False
            await self._resume()

    async def close(self) -> None:
        """Leave no server paused behind. Idempotent."""
        self._dead = True
        await self._carrier.close()
        if self._may_be_paused:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._resume()
        self._may_be_paused = False

    async def changed_by_others(self) -> EngineError | None:
        """An error if the server serves something else than it has confirmed; None too while that may change."""
        if self.lock.locked():
            return None
        async with self.lock:
            label = await self._api.weight_label()
        if version_of(label) == self.version:
            return None
        return EngineError(
            f"{self._api.name} serves weights {label!r} although version {self.version} was confirmed: it was "
            "restarted, or somebody else updates it"
        )

    def given_up(self) -> None:
        """The engine is dead: nothing is retried any more."""
        self._dead = True

    async def _swap(self, version: int, folder: Path) -> None:
        if self._carrier.changes_at_once:
            # Whoever connects after a failure must not take it for what it was.
            await self._api.name_weights(f"{BROADCASTING}{version}")
            self.unknown = True
        why = "the update was broken off"
        try:
            await self._announce()
            await self._carrier.hand_over(version, folder)
            self.unknown = True
            try:
                await self._api.finish_weight_update(label_of(version))
            except EngineError:
                # The answer may be lost although the swap was made.
                if await self._api.weight_label() != label_of(version):
                    raise
            confirmed = await self._api.weight_label()
            if confirmed != label_of(version):
                raise EngineError(f"{self._api.name} serves weights {confirmed!r} after it was given version {version}")
            self.version = version
            self.unknown = False
        except EngineError as error:
            why = str(error)
            raise
        finally:
            if self.unknown:
                what = f"{self._api.name} did not confirm version {version}; what it serves now is unknown"
                self._die(EngineError(f"{what}: {why}"))

    async def _announce(self) -> None:
        try:
            await self._api.start_weight_update()
        except EngineStatusError as error:
            if self._carrier.changes_at_once or LEFT_OPEN not in str(error):
                raise
            # With nothing named since it was announced, finishing it changes nothing.
            await self._api.finish_weight_update(None)
            await self._api.start_weight_update()

    @asynccontextmanager
    async def _pausing(self) -> AsyncIterator[None]:
        try:
            await self._pause()
            yield
        finally:
            if not self._held:
                await self._resume()

    async def _pause(self) -> None:
        self._may_be_paused = True
        await self._api.pause()
        if not await self._api.is_paused():
            raise EngineReplyError(f"{self._api.name} says that it is not paused, right after it was")

    async def _resume(self) -> None:
        error: EngineError | None = None
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                while True:
                    try:
                        await self._api.resume()
                        if not await self._api.is_paused():
                            self._may_be_paused = False
                            return
                    except EngineError as newest:
                        error = newest
                    if self._dead:
                        return
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            why = "it says that it is still paused" if error is None else str(error)
            stuck = EngineError(f"{self._api.name} could not be resumed within {RESUME_TIMEOUT_S:g} s: {why}")
            self._die(stuck)
            raise stuck from None

    @asynccontextmanager
    async def _deadline(self, what: str, version: int) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise EngineTimeoutError(
                f"{self._api.name} did not {what} version {version} within {self._timeout_s:g} s (update_timeout_s)"
            ) from None
