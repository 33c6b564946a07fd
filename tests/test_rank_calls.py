"""Calls to several ranks, on a virtual clock: who failed first, and that nobody is waited for in vain."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from staleflow import clock
from staleflow.errors import TrainerError
from staleflow.testing import run_virtually
from staleflow.trainer.protocol import Answer, Failed, FromRank, Publish
from staleflow.trainer.ranks import ERROR_GRACE_S, FAILED_GRACE_S, RankGoneError, Ranks
from staleflow.types import StepMetrics

LIMIT_S = 1000.0


class ScriptedRank:
    """Answers each call after some time, by a function of its number; one that returns None says nothing."""

    def __init__(self, number: int, after_s: float, answer: Callable[[int], FromRank | TrainerError | None]) -> None:
        self.name = f"trainer-{number}"
        self.calls: list[int] = []
        self.stopped = False
        self._after_s = after_s
        self._answer = answer
        self._answers: asyncio.Queue[FromRank | TrainerError] = asyncio.Queue()
        self._gone: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def post(self, framed: bytes) -> None:
        call = msgspec.msgpack.decode(framed[4:], type=Publish).call
        self.calls.append(call)
        asyncio.get_running_loop().call_later(self._after_s, self._say, call)

    async def flush(self) -> None:
        pass

    async def receive(self) -> FromRank:
        answer = await self._answers.get()
        if isinstance(answer, TrainerError):
            raise answer
        return answer

    async def died(self) -> Exception:
        return await asyncio.shield(self._gone)

    async def stop(self) -> None:
        self.stopped = True

    def _say(self, call: int) -> None:
        answer = self._answer(call)
        if answer is not None:
            self._answers.put_nowait(answer)
        if isinstance(answer, TrainerError):
            self._gone.set_result(answer)


def gone(message: str) -> Callable[[int], TrainerError]:
    return lambda call: TrainerError(message)


def failed(at_ns: int, traceback: str) -> Callable[[int], Failed]:
    return lambda call: Failed(at_ns, traceback)


def error(message: str) -> Callable[[int], Answer]:
    return lambda call: Answer(call, error=message)


def trained(loss: float) -> Callable[[int], Answer]:
    return lambda call: Answer(call, metrics=StepMetrics(loss, 0.0, 0))


def silent(call: int) -> None:
    return None


async def outcome(ranks: Ranks) -> tuple[str, float]:
    """The error of a call, and how long it took."""
    began_s = clock.now()
    with pytest.raises(TrainerError) as raised:
        await ranks.call(Publish(1, "folder"), 1, "write folder", LIMIT_S)
    return str(raised.value), clock.now() - began_s


def check(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(main())


def test_answer_is_that_of_rank_0_once_all_have_answered() -> None:
    async def main() -> None:
        ranks = [ScriptedRank(n, 3.0 - n, trained(loss=n)) for n in range(3)]
        answer = await Ranks(ranks).call(Publish(1, "folder"), 1, "write folder", LIMIT_S)
        assert answer.metrics is not None
        assert (answer.metrics.loss, clock.now()) == (0, 3.0)

    check(main)


def test_rank_that_raised_first_is_named_though_heard_of_second() -> None:
    async def main() -> None:
        first = ScriptedRank(1, 1.0, failed(100, "ValueError: the cause"))
        second = ScriptedRank(0, 0.5, failed(200, "RuntimeError: connection closed by peer"))
        blocked = ScriptedRank(2, 0.0, silent)
        message, took_s = await outcome(Ranks([second, first, blocked]))
        assert message == "trainer-1 could not write folder:\n  | ValueError: the cause\nLater failed trainer-0."
        assert took_s == pytest.approx(0.5 + FAILED_GRACE_S)
        assert first.stopped
        assert second.stopped
        assert blocked.stopped, "whoever is blocked in a collective is ended"

    check(main)


def test_child_that_died_without_a_word_is_named_before_those_that_fail_in_consequence() -> None:
    async def main() -> None:
        killed = ScriptedRank(1, 1.0, gone("trainer-1 was ended by SIGKILL"))
        other = ScriptedRank(0, 0.9, failed(1, "RuntimeError: connection closed by peer"))
        message, _ = await outcome(Ranks([other, killed]))
        assert message.startswith("trainer-1 was ended by SIGKILL")

    check(main)


def test_death_is_told_at_once() -> None:
    async def main() -> None:
        ranks = Ranks([ScriptedRank(0, 0.0, silent), ScriptedRank(1, 1.0, gone("trainer-1 was ended by SIGKILL"))])
        assert await outcome(ranks) == ("trainer-1 was ended by SIGKILL", 1.0)

    check(main)


def test_remote_rank_that_torchrun_ended_is_not_taken_for_the_first() -> None:
    async def main() -> None:
        ended = ScriptedRank(0, 1.0, lambda call: RankGoneError("trainer-0 is gone", 500))
        raised = ScriptedRank(1, 0.9, failed(100, "ValueError: the cause"))
        message, _ = await outcome(Ranks([ended, raised]))
        assert message.startswith("trainer-1 could not write folder:\n  | ValueError: the cause")

    check(main)


def test_error_that_is_alike_ends_nobody() -> None:
    async def main() -> None:
        ranks = [ScriptedRank(n, float(n), error("no space left on device")) for n in range(2)]
        calls = Ranks(ranks)
        assert await outcome(calls) == ("the trainer could not write folder: no space left on device", 1.0)
        assert not any(rank.stopped for rank in ranks)
        await outcome(calls)
        assert [rank.calls for rank in ranks] == [[1, 1], [1, 1]]

    check(main)


def test_rank_that_does_not_answer_after_anothers_error_is_stuck() -> None:
    async def main() -> None:
        ranks = [ScriptedRank(0, 1.0, error("no space left on device")), ScriptedRank(1, 0.0, silent)]
        message, took_s = await outcome(Ranks(ranks))
        assert (message, took_s) == (
            "the trainer could not write folder: no space left on device",
            1.0 + ERROR_GRACE_S,
        )
        assert all(rank.stopped for rank in ranks)

    check(main)


def test_ranks_that_do_not_answer_in_time_are_named() -> None:
    async def main() -> None:
        ranks = Ranks([ScriptedRank(0, 0.0, lambda call: Answer(call)), ScriptedRank(1, 0.0, silent)])
        message, took_s = await outcome(ranks)
        assert message == "the trainer did not write folder within 1000 s: no answer from trainer-1"
        assert took_s == LIMIT_S

    check(main)


def test_call_that_is_cancelled_has_reached_all_ranks_and_its_answers_are_skipped() -> None:
    async def main() -> None:
        ranks = [ScriptedRank(n, 1.0 + n, lambda call: Answer(call, note=str(call))) for n in range(2)]
        calls = Ranks(ranks)
        first = asyncio.create_task(calls.call(Publish(1, "folder"), 1, "write folder", LIMIT_S))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        answer = await calls.call(Publish(2, "folder"), 2, "write folder", LIMIT_S)
        assert answer.call == 2
        assert [rank.calls for rank in ranks] == [[1, 2], [1, 2]]

    check(main)


def test_death_between_calls_is_told_to_whoever_watches() -> None:
    async def main() -> None:
        rank = ScriptedRank(0, 1.0, gone("trainer was ended by SIGKILL"))
        rank.post(b"head" + msgspec.msgpack.encode(Publish(1, "folder")))
        assert str(await Ranks([rank]).died()) == "trainer was ended by SIGKILL"

    check(main)


def test_note_of_a_rank_is_a_warning_of_the_controller(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        rank = ScriptedRank(0, 0.0, lambda call: Answer(call, note="FSDP2 does not run here"))
        await Ranks([rank]).call(Publish(1, "folder"), 1, "write folder", LIMIT_S)

    with caplog.at_level(logging.WARNING, logger="staleflow"):
        check(main)
    assert caplog.messages == ["trainer-0: FSDP2 does not run here"]
