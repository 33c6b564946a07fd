"""Supervision: keeps engines alive. One task for each starts it, serves, notices its death and starts it again.

Invariant: a run has an engine that serves or may come back, or it ends with the error of the last that died. What is
believed of an engine meanwhile is the fleet's business (``docs/design/engines.md``).
"""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from staleflow import clock
from staleflow.abandon import abandon, done_or_set
from staleflow.config import Config
from staleflow.coordinator import Health
from staleflow.engine_state import EngineState
from staleflow.errors import EngineError, EngineGoneError
from staleflow.events import EngineDied, EngineRestarted, EngineRetired
from staleflow.fleet import Fleet
from staleflow.members import Spawn
from staleflow.recorder import Recorder

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
GOOD_WHILE_S = 600.0
"""An engine that has served for so long has its restarts back."""
STOP_TIMEOUT_S = 60.0
ACCOUNT_TIMEOUT_S = 30.0
"""For an engine whose connections have broken to say how it has ended. Both leave time for all that a server on a leash
has started to be ended (``staleflow.leash``)."""

logger = logging.getLogger("staleflow")


class Supervision:
    """The engines' lives.

    Args:
        fleet: the engines.
        config: how often an engine is started again, and how long the run does without any.
        log_folder: where engines write their logs.
        recorder: is told of deaths.
        spawn: starts a task of the run.
    """

    def __init__(self, *, fleet: Fleet, config: Config, log_folder: Path, recorder: Recorder, spawn: Spawn) -> None:
        self._fleet = fleet
        self._config = config
        self._log_folder = log_folder
        self._recorder = recorder
        self._spawn = spawn
        self._tried = {state.index: asyncio.Event() for state in fleet.states}
        self._some_started = asyncio.Event()
        self._newest_death: EngineError | None = None

    async def start(self) -> None:
        """Start all engines; returns when each has tried and one is there. The others follow when they can."""
        for state in self._fleet.states:
            self._spawn(self._supervise(state), state.name)
        for tried in self._tried.values():
            await tried.wait()
        await self._some_started.wait()

    async def watch(self) -> None:
        """Raise :class:`EngineError` when no engine has served for too long."""
        outage, limit_s = self._fleet.outage, self._config.no_engine_timeout_s
        while True:
            await outage.began.wait()
            try:
                async with asyncio.timeout(limit_s):
                    await outage.ended.wait()
            except TimeoutError:
                raise EngineError(
                    f"no engine has served for {limit_s:g} s (no_engine_timeout_s); the newest death: "
                    f"{self._newest_death or 'none'}"
                ) from self._newest_death

    async def _supervise(self, state: EngineState) -> None:
        left, pause_s = self._config.engine_restarts, FIRST_PAUSE_S
        while True:
            error, served_s = await self._live(state)
            self._newest_death = error
            if served_s >= GOOD_WHILE_S:
                left, pause_s = self._config.engine_restarts, FIRST_PAUSE_S
            if left == 0:
                return self._retire(state, error)
            logger.warning("%s is started again in %g s, %d restarts left: %s", state.name, pause_s, left - 1, error)
            await self._stop(state)
            await asyncio.sleep(pause_s)
            left, pause_s = left - 1, min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live(self, state: EngineState) -> tuple[EngineError, float]:
        """One life of an engine; returns why it ended, and how long it has served."""
        try:
            await state.engine.start(state.name, self._log_folder)
        except EngineError as error:
            self._died(state, error)
            return error, 0.0
        finally:
            self._tried[state.index].set()
        self._fleet.started(state)
        self._some_started.set()
        if state.epoch > 0:
            self._recorder.event(EngineRestarted(self._recorder.t(), state.index, state.epoch))
        death = await self._serve(state)
        return death, 0.0 if state.serves_since_s is None else clock.now() - state.serves_since_s

    async def _serve(self, state: EngineState) -> EngineError:
        """Run an engine until it dies, whoever notices first."""
        running = asyncio.ensure_future(state.engine.run())
        try:
            await done_or_set(running, state.died)
            if state.died.is_set() and state.death is not None:
                self._note(state, state.death)
                return await self._account(running, state.death)
            running.result()
            death = EngineError(f"{state.name} has stopped serving")
        except EngineError as raised:
            death = raised
        finally:
            abandon(running)
        self._died(state, death)
        return death

    def _died(self, state: EngineState, error: EngineError) -> None:
        self._fleet.died(state, error)
        self._note(state, error)

    def _note(self, state: EngineState, error: EngineError) -> None:
        # When it is noticed, though there may be more to tell of it later: the log is in order of time.
        self._recorder.event(EngineDied(self._recorder.t(), state.index, str(error)))

    async def _account(self, running: "asyncio.Future[None]", death: EngineError) -> EngineError:
        """Why an engine has died: a broken connection is the first sign, and says least; the engine may know more."""
        if isinstance(death, EngineGoneError):
            await asyncio.wait({running}, timeout=ACCOUNT_TIMEOUT_S)
            if running.done() and isinstance(told := running.exception(), EngineError):
                return told
        return death

    async def _stop(self, state: EngineState) -> None:
        """Clear away what is left of a dead engine."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await state.engine.stop()

    def _retire(self, state: EngineState, error: EngineError) -> None:
        self._fleet.retired(state)
        self._recorder.event(EngineRetired(self._recorder.t(), state.index, str(error)))
        if all(other.health is Health.RETIRED for other in self._fleet.states):
            raise error
        logger.warning("%s is given up after %d restarts: %s", state.name, self._config.engine_restarts, error)
