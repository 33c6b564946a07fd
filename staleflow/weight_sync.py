"""Weight sync: carries a published version to one engine, after what its mode asks for.

Invariant: in every mode but ``keep``, weights are touched only when the engine runs nothing and takes nothing. The
version stays pullable from the moment at which the sync begins, whatever is published before it is carried out. An
update counts only if the engine confirms it in the life in which it was asked for it; an engine whose update fails is
dead (``docs/design/engines.md``).
"""

import asyncio
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, assert_never

from staleflow.abandon import abandon, done_or_set
from staleflow.coordinator import Health
from staleflow.engine_state import EngineState
from staleflow.errors import EngineError
from staleflow.fleet import Fleet
from staleflow.parameter_server.base import ParameterServer
from staleflow.types import Interruption, SyncMode

UPDATE_TIMEOUT_S = 600.0
QUIESCE_TIMEOUT_S = 60.0
"""An engine that has not let go of its requests by then is taken for dead."""
INTERRUPT_AGAIN_S = 1.0


class BegunSync(NamedTuple):
    """A sync that is to be carried out: of an engine of this epoch, with weights that stay until ``pull`` is closed."""

    engine: int
    version: int
    mode: SyncMode
    epoch: int
    weights: Path
    pull: ExitStack


class WeightSync:
    """Syncs of all engines.

    Args:
        fleet: the engines.
        weights: where they pull from.
        drain_timeout_s: in mode ``drain``, requests that have not ended by then are interrupted.
    """

    def __init__(self, fleet: Fleet, weights: ParameterServer, drain_timeout_s: float) -> None:
        self._fleet = fleet
        self._weights = weights
        self._drain_timeout_s = drain_timeout_s

    def begin(self, engine: int, version: int, mode: SyncMode) -> BegunSync | None:
        """Mark an engine as syncing; None if it is not there, syncs already or is held at another version.

        In mode ``keep`` it goes on serving, at its old version as far as anyone may believe. Raises ``KeyError`` when
        the version cannot be pulled.
        """
        state = self._fleet.states[engine]
        if state.health not in (Health.HEALTHY, Health.STALE) or state.held_at not in (None, version):
            return None
        pull = ExitStack()
        weights = pull.enter_context(self._weights.pulling(version))
        state.begin_sync(mode)
        return BegunSync(engine, version, mode, state.epoch, weights, pull)

    async def carry_out(self, sync: BegunSync) -> bool:
        """Let the engine pull the version; returns whether it has confirmed it."""
        state = self._fleet.states[sync.engine]
        if state.epoch != sync.epoch:
            # It has died meanwhile.
            sync.pull.close()
            return False
        updating = asyncio.ensure_future(self._update(state, sync))
        # One that is abandoned ends after this.
        updating.add_done_callback(lambda _: sync.pull.close())
        try:
            await done_or_set(updating, state.died)
            if state.epoch == sync.epoch:
                updating.result()
                self._fleet.confirmed(state, sync.version)
        except EngineError as error:
            self._fleet.died(state, error)
        finally:
            abandon(updating)
        return state.epoch == sync.epoch

    async def _update(self, state: EngineState, sync: BegunSync) -> None:
        """Raises :class:`EngineError` when the engine confirms another version, or nothing."""
        await self._quiesce(state, sync.mode)
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                confirmed = await self._swap(state, sync)
        except TimeoutError:
            raise EngineError(
                f"{state.name} did not confirm version {sync.version} within {UPDATE_TIMEOUT_S:.0f} s"
            ) from None
        if confirmed != sync.version:
            raise EngineError(f"{state.name} confirmed version {confirmed} after it was told to pull {sync.version}")

    async def _swap(self, state: EngineState, sync: BegunSync) -> int:
        try:
            return await state.engine.update_weights(sync.version, sync.weights)
        except EngineError as error:
            raise EngineError(f"{state.name} could not be updated to version {sync.version}: {error}") from error

    async def _quiesce(self, state: EngineState, mode: SyncMode) -> None:
        match mode:
            case "keep":
                return
            case "drain":
                try:
                    async with asyncio.timeout(self._drain_timeout_s):
                        await state.empty.wait()
                except TimeoutError:
                    await self._let_go(state, Interruption.DRAIN)
            case "recompute":
                await self._let_go(state, Interruption.RECOMPUTE)
            case "abort":
                await self._let_go(state, Interruption.ABORT)
            case _:
                assert_never(mode)

    async def _let_go(self, state: EngineState, why: Interruption) -> None:
        """Interrupt until nothing runs; an interruption that has overtaken its request is repeated."""
        try:
            async with asyncio.timeout(QUIESCE_TIMEOUT_S):
                while state.requests:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(INTERRUPT_AGAIN_S):
                            await asyncio.gather(*(self._fleet.interrupt(request, why) for request in state.requests))
                            await state.empty.wait()
        except TimeoutError:
            raise EngineError(
                f"{state.name} did not let go of {len(state.requests)} requests within {QUIESCE_TIMEOUT_S:.0f} s"
            ) from None
