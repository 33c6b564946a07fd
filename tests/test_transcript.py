"""A member is played again and answered from its transcript, as long as it asks what it had asked."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from staleflow import LLM, Completion, Trajectory
from staleflow.errors import ContextError, EngineError
from staleflow.rollout import MAX_UNANSWERED
from staleflow.testing import run_virtually
from staleflow.transcript import Transcript
from staleflow.types import FinishReason, Segment, Turn


def sampled(*tokens: int, version: int = 3, engine: int = 0) -> Segment:
    return Segment(list(tokens), True, engine, [-0.5 - token for token in tokens], [version] * len(tokens))


def injected(*tokens: int) -> Segment:
    return Segment(list(tokens), sampled=False)


def said(*segments: Segment, turns: list[Turn]) -> Trajectory:
    return Trajectory(0, 1, 0, 0, 0.0, segments=list(segments), turns=turns, requests=5, first_segment_s=-2.0)


TWO_TURNS = said(
    injected(1, 2),
    sampled(7, 8),
    injected(3),
    sampled(9, version=4),
    turns=[Turn(0, 4, "stop"), Turn(2, 5, "length")],
)
UNFINISHED = said(
    injected(1, 2),
    sampled(7, 8),
    injected(3),
    sampled(9, version=4),
    sampled(10, 11, version=5, engine=1),
    turns=[Turn(0, 4, "stop"), Turn(2, 5)],
)


class Attempt:
    """The next attempt of a member that had said something; engines answer with 50, 51, ..."""

    def __init__(self, said: Trajectory, *, fails: int = 0) -> None:
        self.trajectory = Trajectory(0, 1, 0, 1, 0.0)
        self.over: list[tuple[int, int]] = []
        self.asked: list[tuple[list[int], int]] = []
        self.transcript = Transcript(said, lambda reused, dropped: self.over.append((reused, dropped)))
        self.llm = LLM(self.trajectory, self.generate, None, 100, self.transcript)
        self._fails = fails

    async def generate(self, trajectory: Trajectory, max_new_tokens: int) -> FinishReason:
        self.asked.append((trajectory.token_ids, max_new_tokens))
        await asyncio.sleep(1.0)
        if len(self.asked) <= self._fails:
            raise EngineError("died")
        trajectory.segments.append(sampled(49 + len(self.asked), version=6))
        return "stop"

    def run(self, rollout: Callable[[LLM], Awaitable[None]]) -> float:
        """Play; returns how long it took."""

        async def main() -> float:
            await rollout(self.llm)
            self.llm.close()
            return asyncio.get_running_loop().time()

        return run_virtually(main())


async def two_turns(llm: LLM) -> list[Completion]:
    return [await llm.generate([1, 2], max_new_tokens=4), await llm.generate([3], max_new_tokens=5)]


def test_same_calls_are_answered_at_once_without_an_engine() -> None:
    attempt = Attempt(TWO_TURNS)
    completions: list[Completion] = []

    async def rollout(llm: LLM) -> None:
        completions.extend(await two_turns(llm))

    assert attempt.run(rollout) == 0.0
    assert attempt.asked == []
    assert [(done.token_ids, done.logprobs, done.finish_reason) for done in completions] == [
        ([7, 8], [-7.5, -8.5], "stop"),
        ([9], [-9.5], "length"),
    ]
    assert attempt.trajectory.segments == TWO_TURNS.segments
    assert attempt.trajectory.turns == TWO_TURNS.turns
    assert attempt.trajectory.first_segment_s == -2.0
    assert attempt.over == [(3, 0)]


def test_first_call_beyond_is_answered_by_an_engine() -> None:
    attempt = Attempt(TWO_TURNS)

    async def rollout(llm: LLM) -> None:
        await two_turns(llm)
        assert attempt.over == [(3, 0)]
        assert (await llm.generate([4], max_new_tokens=6)).token_ids == [50]

    attempt.run(rollout)
    assert attempt.asked == [([1, 2, 7, 8, 3, 9, 4], 6)]
    assert attempt.trajectory.turns == [*TWO_TURNS.turns, Turn(4, 6, "stop")]
    assert attempt.over == [(3, 0)]


def test_unfinished_call_goes_on_where_it_stopped() -> None:
    attempt = Attempt(UNFINISHED)

    async def rollout(llm: LLM) -> None:
        _, second = await two_turns(llm)
        assert (second.token_ids, second.logprobs) == ([9, 10, 11, 50], [-9.5, -10.5, -11.5, -50.5])

    attempt.run(rollout)
    assert attempt.asked == [([1, 2, 7, 8, 3, 9, 10, 11], 2)]
    assert attempt.trajectory.versions == [3, 3, 4, 5, 5, 6]
    assert attempt.trajectory.turns == [Turn(0, 4, "stop"), Turn(2, 5, "stop")]
    assert attempt.over == [(5, 0)]


def test_unfinished_call_that_had_all_its_tokens_asks_for_none() -> None:
    attempt = Attempt(said(injected(1, 2), sampled(5, 6, 7, 8), turns=[Turn(0, 4)]))

    async def rollout(llm: LLM) -> None:
        assert (await llm.generate([1, 2], max_new_tokens=4)).finish_reason == "length"

    attempt.run(rollout)
    assert attempt.asked == []


@pytest.mark.parametrize(("prompt", "max_new_tokens"), [([4], 5), ([3], 6), ([], 5), ([3, 3], 5)])
def test_another_call_drops_the_rest(prompt: list[int], max_new_tokens: int) -> None:
    attempt = Attempt(UNFINISHED)

    async def rollout(llm: LLM) -> None:
        await llm.generate([1, 2], max_new_tokens=4)
        assert (await llm.generate(prompt, max_new_tokens=max_new_tokens)).token_ids == [50]
        assert (await llm.generate([3], max_new_tokens=5)).token_ids == [51], "the rest must not come back later"

    attempt.run(rollout)
    assert attempt.asked[0] == ([1, 2, 7, 8, *prompt], max_new_tokens)
    assert attempt.over == [(2, 3)]


def test_rollout_that_ends_before_drops_the_rest() -> None:
    attempt = Attempt(TWO_TURNS)

    async def rollout(llm: LLM) -> None:
        await llm.generate([1, 2], max_new_tokens=4)

    attempt.run(rollout)
    assert attempt.trajectory.token_ids == [1, 2, 7, 8]
    assert attempt.over == [(2, 1)]


def test_call_that_fails_has_said_nothing_and_is_answered_again() -> None:
    attempt = Attempt(UNFINISHED, fails=1)

    async def rollout(llm: LLM) -> None:
        await llm.generate([1, 2], max_new_tokens=4)
        with pytest.raises(EngineError):
            await llm.generate([3], max_new_tokens=5)
        assert attempt.trajectory.token_ids == [1, 2, 7, 8]
        assert attempt.transcript.longest(attempt.trajectory) is UNFINISHED
        await llm.generate([3], max_new_tokens=5)

    attempt.run(rollout)
    assert attempt.trajectory.token_ids == [1, 2, 7, 8, 3, 9, 10, 11, 51]
    assert attempt.over == [(5, 0)]


def test_call_that_is_cancelled_while_it_is_answered_has_said_nothing() -> None:
    attempt = Attempt(TWO_TURNS)

    async def rollout(llm: LLM) -> None:
        call = asyncio.ensure_future(llm.generate([1, 2], max_new_tokens=4))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert attempt.trajectory.segments == []
        await two_turns(llm)

    attempt.run(rollout)
    assert attempt.trajectory.segments == TWO_TURNS.segments


def test_two_calls_at_once_are_refused_as_they_were() -> None:
    attempt = Attempt(TWO_TURNS)

    async def rollout(llm: LLM) -> None:
        calls = (llm.generate([1, 2], max_new_tokens=4), llm.generate([3], max_new_tokens=5))
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, Completion)
        assert isinstance(second, ContextError)

    attempt.run(rollout)


def test_trajectory_that_was_cut_short_stays_so() -> None:
    attempt = Attempt(said(injected(1), sampled(7), turns=[Turn(0, 4, "truncated")]))

    async def rollout(llm: LLM) -> None:
        for _ in range(MAX_UNANSWERED):
            assert (await llm.generate([1], max_new_tokens=4)).finish_reason == "truncated"

    attempt.run(rollout)
    assert attempt.trajectory.truncated
    assert attempt.trajectory.token_ids == [1, 7]
    assert attempt.asked == []


def test_what_is_kept_is_never_less_than_what_was_said() -> None:
    attempt = Attempt(UNFINISHED)
    kept: list[Trajectory] = []

    async def watch() -> None:
        while True:
            longest = attempt.transcript.longest(attempt.trajectory)
            assert longest.token_ids[: len(UNFINISHED.token_ids)] == UNFINISHED.token_ids
            kept.append(longest)
            await asyncio.sleep(0)

    async def rollout(llm: LLM) -> None:
        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0)
        await llm.generate([1, 2], max_new_tokens=4)
        await asyncio.sleep(0)
        second = asyncio.ensure_future(llm.generate([3], max_new_tokens=5))
        for _ in range(3):
            await asyncio.sleep(0)
        watching.cancel()
        await second

    attempt.run(rollout)
    assert {id(trajectory) for trajectory in kept} == {id(UNFINISHED), id(attempt.trajectory)}
