"""The ranks of a trainer, as the controller sees them: one call at a time, to all of them at once.

Knows wires, answers and deaths, and which of several failures came first; how ranks come to be is the business of
``local`` and ``remote``, and what they compute nobody's here.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from staleflow.errors import TrainerError
from staleflow.process import frame
from staleflow.trainer.protocol import Answer, Failed, FromRank

FAILED_GRACE_S = 2.0
"""How long to listen for a rank that failed before the one that was heard of first."""
ERROR_GRACE_S = 30.0
"""How long a rank may take to answer when another has answered with an error, which should be alike on all."""

logger = logging.getLogger("staleflow")


class Rank(Protocol):
    """The controller's end of a rank. Once the rank is gone, waiting raises :class:`TrainerError` that says how."""

    name: str

    def post(self, framed: bytes) -> None:
        """Write one message without waiting."""

    async def flush(self) -> None:
        """Wait while the rank is far behind."""

    async def receive(self) -> FromRank:
        """The next answer; may be cancelled and called again."""

    async def died(self) -> Exception:
        """Wait until the rank is gone; returns the error that says how."""

    async def stop(self) -> None:
        """End it, wherever it is blocked. Idempotent."""


class RankGoneError(TrainerError):
    """The connection of a rank has ended without a word, ``at_ns`` after the epoch on this machine."""

    def __init__(self, message: str, at_ns: int) -> None:
        super().__init__(message)
        self.at_ns = at_ns


class _Failure(NamedTuple):
    """``at_ns`` is 0 for a child that died without a word: none of the others can have made it do that."""

    at_ns: int
    rank: str
    error: str
    fatal: bool


class Ranks:
    """All ranks of a trainer. The first fatal failure ends all of them, and every later call raises it."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._idle = asyncio.Event()
        self._idle.set()
        self._failure: TrainerError | None = None

    async def call(self, message: msgspec.Struct, call: int, work: str, timeout_s: float) -> Answer:
        """Send a message to all ranks and wait for their answers to ``call``; returns that of rank 0.

        Raises :class:`TrainerError` that tells the work that could not be done, and why.
        """
        if self._failure is not None:
            raise TrainerError(str(self._failure))
        self._idle.clear()
        # All ranks or none, even if this call is cancelled: nothing is awaited in between.
        framed = frame(message)
        for rank in self._ranks:
            rank.post(framed)
        answers = [asyncio.create_task(_answer(rank, call, work)) for rank in self._ranks]
        try:
            return await self._all(answers, work, timeout_s)
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.wait(answers)
            self._idle.set()

    async def died(self) -> TrainerError:
        """Wait until a rank is gone; returns the error of the one that failed first."""
        deaths = [asyncio.create_task(rank.died()) for rank in self._ranks]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            # A call that is going on hears of it too, and finds out who was first.
            await self._idle.wait()
            return self._failure or TrainerError(str(next(iter(done)).result()))
        finally:
            for death in deaths:
                death.cancel()

    async def stop(self) -> None:
        """End all of them. Idempotent."""
        await asyncio.gather(*(rank.stop() for rank in self._ranks))

    async def _all(self, answers: "Sequence[asyncio.Task[Answer | _Failure]]", work: str, timeout_s: float) -> Answer:
        pending = set(answers)
        ends_s = asyncio.get_running_loop().time() + timeout_s
        while pending:
            left_s = ends_s - asyncio.get_running_loop().time()
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TrainerError(f"the trainer did not {work} within {timeout_s:.0f} s{self._missing(answers)}")
            failures = [result for result in (task.result() for task in done) if isinstance(result, _Failure)]
            if failures:
                raise await self._first(failures, pending)
        results = [task.result() for task in answers]
        return next(result for result in results if isinstance(result, Answer))

    async def _first(self, failures: list[_Failure], pending: "set[asyncio.Task[Answer | _Failure]]") -> TrainerError:
        """The error of the rank that failed first, once all the others have answered or are ended."""
        if pending and all(failure.at_ns for failure in failures):
            fatal = any(failure.fatal for failure in failures)
            done, pending = await asyncio.wait(pending, timeout=FAILED_GRACE_S if fatal else ERROR_GRACE_S)
            failures += [result for result in (task.result() for task in done) if isinstance(result, _Failure)]
        fatal = any(failure.fatal for failure in failures)
        first, *later = sorted(failures, key=lambda failure: (not failure.fatal, failure.at_ns, failure.rank))
        error = TrainerError("\n".join([first.error, *(f"Later failed {each.rank}." for each in later if fatal)]))
        if fatal or pending:
            self._failure = error
            await self.stop()
        return error

    def _missing(self, answers: "Sequence[asyncio.Task[Answer | _Failure]]") -> str:
        silent = [rank.name for rank, task in zip(self._ranks, answers, strict=True) if not task.done()]
        return "" if len(self._ranks) == 1 else f": no answer from {', '.join(silent)}"


async def _answer(rank: Rank, call: int, work: str) -> Answer | _Failure:
    """The rank's answer to the call; those to calls that were cancelled are skipped."""
    try:
        await rank.flush()
        while True:
            match await rank.receive():
                case Failed(at_ns, traceback):
                    lines = "\n".join(f"  | {line}" for line in traceback.rstrip().splitlines())
                    return _Failure(at_ns, rank.name, f"{rank.name} could not {work}:\n{lines}", fatal=True)
                case Answer() as answer if answer.call == call:
                    break
    except RankGoneError as error:
        return _Failure(error.at_ns, rank.name, str(error), fatal=True)
    except TrainerError as error:
        return _Failure(0, rank.name, str(error), fatal=True)
    if answer.error is not None:
        return _Failure(1, rank.name, f"the trainer could not {work}: {answer.error}", fatal=False)
    if answer.note is not None:
        logger.warning("%s: %s", rank.name, answer.note)
    return answer
