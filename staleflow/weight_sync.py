"""Weight sync: carries a published version to one engine, after what its mode asks for.

Invariant: in every mode but ``keep``, weights are touched only when the engine runs nothing and takes nothing. An
update counts only if the engine confirms it in the life in which it was asked for it; an engine whose update fails is
dead (``docs/design/engines.md``).
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import assert_never

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

    def begin(self, engine: int, version: int, mode: SyncMode) -> bool:
        """Mark an engine as syncing; False if it is not there, syncs already or is held at another version.

        In mode ``keep`` it goes on serving, at its old version as far as anyone may believe.
        """
        state = self._fleet.states[engine]
        if state.health not in (Health.HEALTHY, Health.STALE) or state.held_at not in (None, version):
            return False
        state.begin_sync(mode)
        return True

    async def carry_out(self, engine: int, version: int, mode: SyncMode) -> bool:
        """Let an engine that was marked pull a version; returns whether it has confirmed it."""
        state = self._fleet.states[engine]
        epoch = state.epoch
        if state.health is not Health.SYNCING:
            # It has died since it was marked.
            return False
        updating = asyncio.ensure_future(self._update(state, version, mode))
        try:
            await done_or_set(updating, state.died)
            if state.epoch == epoch:
                updating.result()
                self._fleet.confirmed(state, version)
        except EngineError as error:
            self._fleet.died(state, error)
        finally:
            abandon(updating)
        return state.epoch == epoch

    async def _update(self, state: EngineState, version: int, mode: SyncMode) -> None:
        """Raises :class:`EngineError` when the engine confirms another version, or nothing."""
        with self._weights.pulling(version) as weights:
            await self._quiesce(state, mode)
            try:
                async with asyncio.timeout(UPDATE_TIMEOUT_S):
                    confirmed = await self._swap(state, version, weights)
            except TimeoutError:
                raise EngineError(
                    f"{state.name} did not confirm version {version} within {UPDATE_TIMEOUT_S:.0f} s"
                ) from None
        if confirmed != version:
            raise EngineError(f"{state.name} confirmed version {confirmed} after it was told to pull {version}")

    async def _swap(self, state: EngineState, version: int, weights: Path) -> int:
        try:
            return await state.engine.update_weights(version, weights)
        except EngineError as error:
            raise EngineError(f"{state.name} could not be updated to version {version}: {error}") from error

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
