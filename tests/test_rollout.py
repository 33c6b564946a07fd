import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from staleflow import LLM, Completion, Trajectory
from staleflow.errors import ContextError, RewardError, RolloutError, RolloutTimeoutError
from staleflow.outage import Outage
from staleflow.rollout import CANCEL_GRACE_S, Deadline, Rollout, play
from staleflow.testing import run_virtually
from staleflow.types import FinishReason, Segment


def trajectory() -> Trajectory:
    return Trajectory(task=0, group=1, member=0, attempt=0, admitted_s=0.0)


def llm_of(trajectory: Trajectory, *, answer: Sequence[int] = (7, 8), tokenizer: Tokenizer | None = None) -> LLM:
    async def generate(trajectory: Trajectory, max_new_tokens: int) -> FinishReason:
        await asyncio.sleep(1.0)
        tokens = list(answer)
        trajectory.segments.append(Segment(tokens, True, 0, [-0.5] * len(tokens), [3] * len(tokens)))
        return "stop"

    return LLM(trajectory, generate, tokenizer, max_model_tokens=16)


def deadline(timeout_s: float) -> Deadline:
    """One that no engine's death extends."""
    outage = Outage()
    outage.update(serves=True)
    return Deadline(timeout_s, outage)


def played(rollout: Rollout[int], timeout_s: float = 10.0) -> tuple[Trajectory, float]:
    """The trajectory, and the virtual second at which the play ended."""

    async def main() -> tuple[Trajectory, float]:
        result = trajectory()
        await play(rollout, 0, llm_of(result), result, deadline(timeout_s))
        return result, asyncio.get_running_loop().time()

    return run_virtually(main())


# -- the reward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0, 1.5, -2, True, False])
def test_number_is_a_reward(reward: float) -> None:
    async def rollout(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=2)
        return reward

    result, ended_s = played(rollout)
    assert result.reward == float(reward)
    assert isinstance(result.reward, float)
    assert (result.finished_s, ended_s) == (1.0, 1.0)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None, "1", [1], {}, 1j])
def test_anything_else_is_refused_and_shown(reward: Any) -> None:
    async def rollout(task: int, llm: LLM) -> Any:
        await llm.generate([1], max_new_tokens=2)
        return reward

    with pytest.raises(RewardError, match="a reward is a finite number") as caught:
        played(rollout)
    assert repr(reward) in str(caught.value)


class Scalar:
    """A number of another library."""

    def __init__(self, value: float | Exception) -> None:
        self._value = value

    def __float__(self) -> float:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def returns(reward: Any) -> Rollout[int]:
    async def rollout(task: int, llm: LLM) -> Any:
        await llm.generate([1], max_new_tokens=2)
        return reward

    return rollout


def test_number_of_another_library_is_a_reward() -> None:
    result, _ = played(returns(Scalar(0.75)))
    assert result.reward == 0.75
    assert type(result.reward) is float, "it would not reach the log"


@pytest.mark.parametrize(
    "reward",
    [
        Scalar(TypeError("only length-1 arrays can be converted")),
        Scalar(ValueError("more than one element")),
        Scalar(RuntimeError("a tensor with 2 elements cannot be converted to Scalar")),
        Scalar(math.nan),
        pytest.param(10**400, id="too large"),
    ],
)
def test_what_cannot_become_a_finite_number_is_refused(reward: Any) -> None:
    with pytest.raises(RewardError, match="a reward is a finite number"):
        played(returns(reward))


def test_reward_without_a_sampled_token_is_refused() -> None:
    result = trajectory()

    async def rollout(task: int, llm: LLM) -> float:
        return 1.0

    async def main() -> None:
        await play(rollout, 0, llm_of(result), result, deadline(1.0))

    with pytest.raises(RolloutError, match="without sampling a token"):
        run_virtually(main())
    assert result.reward is None, "it would count in a mean over held-out tasks"


def test_error_of_the_rollout_comes_through_unchanged() -> None:
    async def rollout(task: int, llm: LLM) -> float:
        raise LookupError("no sandbox")

    with pytest.raises(LookupError, match="no sandbox"):
        played(rollout)


def test_rollout_that_cancels_itself_is_an_error_not_a_cancellation() -> None:
    async def rollout(task: int, llm: LLM) -> float:
        raise asyncio.CancelledError

    with pytest.raises(RolloutError, match="cancelled itself"):
        played(rollout)


# -- the deadline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [9.99, 10.01])
def test_deadline(seconds: float) -> None:
    async def rollout(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=2)
        await asyncio.sleep(seconds - 1.0)
        return 1.0

    if seconds < 10:
        assert played(rollout)[0].reward == 1.0
    else:
        with pytest.raises(RolloutTimeoutError, match="no reward after 10 s"):
            played(rollout)


@pytest.mark.parametrize("by", ["deadline", "cancellation"])
def test_rollout_that_ignores_its_cancellation_is_left_behind(by: str) -> None:
    async def rollout(task: int, llm: LLM) -> float:
        for _ in range(2):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue
        return 1.0

    async def main() -> float:
        result = trajectory()
        playing = asyncio.ensure_future(play(rollout, 0, llm_of(result), result, deadline(10.0)))
        if by == "cancellation":
            await asyncio.sleep(10.0)
            playing.cancel()
        with pytest.raises(RolloutTimeoutError if by == "deadline" else asyncio.CancelledError):
            await playing
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(10.0 + CANCEL_GRACE_S)


# -- one sequence of tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 1, "empty"),
        ([1], 0, "max_new_tokens is 0"),
        ([1], -5, "max_new_tokens is -5"),
        ([1] * 16, 1, "exceed the 16 tokens"),
        ([1], 16, "exceed the 16 tokens"),
        ("text", 1, r"no tokenizer\.json"),
    ],
)
def test_prompt_that_cannot_be_served_is_refused(prompt: Any, max_new_tokens: int, message: str) -> None:
    result = trajectory()
    with pytest.raises(ContextError, match=message):
        run_virtually(llm_of(result).generate(prompt, max_new_tokens=max_new_tokens))
    assert result.segments == []


def test_trajectory_may_fill_the_model_exactly() -> None:
    result = trajectory()
    run_virtually(llm_of(result).generate([1] * 14, max_new_tokens=2))
    assert len(result.token_ids) == 16


def test_two_calls_at_once_are_refused() -> None:
    result = trajectory()
    llm = llm_of(result)

    async def main() -> tuple[Completion | BaseException, Completion | BaseException]:
        return await asyncio.gather(
            llm.generate([1], max_new_tokens=2), llm.generate([2], max_new_tokens=2), return_exceptions=True
        )

    first, second = run_virtually(main())
    assert isinstance(first, Completion)
    assert first.token_ids == [7, 8]
    assert isinstance(second, ContextError)
    assert result.token_ids == [1, 7, 8]


def test_text_is_encoded_and_decoded() -> None:
    tokenizer = Tokenizer(models.WordLevel({"red": 1, "green": 2, "blue": 3}, unk_token="red"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment, unused-ignore]
    result = trajectory()
    completion = run_virtually(llm_of(result, answer=[3], tokenizer=tokenizer).generate("green blue", max_new_tokens=2))
    assert (completion.text, completion.token_ids, completion.logprobs) == ("blue", [3], [-0.5])
    assert result.token_ids == [2, 3, 3]
    assert result.versions == [3]
