"""The user's face: ``async def rollout(task, llm) -> reward``.

:class:`LLM` records every token of one trajectory while the user's function talks to the policy;
:func:`play` runs that function under its deadline and checks what it returns. Neither knows which engine answers
or what becomes of the trajectory.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import SupportsFloat, TypeAlias

import msgspec
from tokenizers import Tokenizer

from staleflow import clock
from staleflow.abandon import done_or_set
from staleflow.errors import ContextError, RewardError, RolloutError, RolloutTimeoutError, TruncatedError
from staleflow.outage import Outage
from staleflow.transcript import Transcript
from staleflow.types import FinishReason, Segment, TaskData, Trajectory, Turn

CANCEL_GRACE_S = 1.0
MAX_UNANSWERED = 100
"""Calls that a truncated trajectory may make in vain; one that makes more would never end."""


class Completion(msgspec.Struct, frozen=True):
    """What the policy said in one call.

    ``text`` is without special tokens, empty when the model folder has no tokenizer; ``logprobs`` are the behaviour
    logprobs of ``token_ids``.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


Continue: TypeAlias = Callable[[Trajectory, int], Awaitable[FinishReason]]
"""``(trajectory, max_new_tokens)``: sample, append the segments to the trajectory, say why sampling stopped."""


class LLM:
    """The policy, as one trajectory sees it: the engines, and before them the transcript of an earlier attempt."""

    def __init__(
        self,
        trajectory: Trajectory,
        generate: Continue,
        tokenizer: Tokenizer | None,
        max_model_tokens: int,
        transcript: Transcript | None = None,
    ) -> None:
        self._trajectory = trajectory
        self._transcript = transcript
        self._generate = generate
        self._tokenizer = tokenizer
        self._max_model_tokens = max_model_tokens
        self._closed = False
        self._unanswered = 0
        self.busy = False

    def close(self) -> None:
        """Refuse further calls: the trajectory has ended, and what has been scored must not grow."""
        self._closed = True
        if self._transcript is not None:
            self._transcript.end(self._trajectory)

    async def generate(self, prompt: str | Sequence[int], *, max_new_tokens: int) -> Completion:
        """Append ``prompt`` to the trajectory, then let the policy continue it by at most ``max_new_tokens``.

        The first call gives the prompt; later calls give what the environment says next, and only that: the
        trajectory so far is remembered. Text is encoded with the model's tokenizer, without special tokens.

        Raises:
            ContextError: the trajectory would be empty, or longer than the model can serve, or a call of this
                trajectory is still running; a trajectory is one sequence of tokens.
            TruncatedError: the straggler policy has cut the trajectory short, and the rollout goes on asking. The
                call that was cut returns what was sampled, later ones return nothing at once, all of them with
                ``finish_reason`` ``"truncated"``, so that the rollout comes to its reward.
        """
        if max_new_tokens < 1:
            raise ContextError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        if self._closed:
            raise ContextError("the trajectory has ended: its rollout function has returned or was given up")
        if self.busy:
            raise ContextError("two generate calls of one trajectory at once; a trajectory is one sequence of tokens")
        if self._trajectory.truncated:
            return await self._say_nothing()
        injected = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        length = len(self._trajectory.token_ids) + len(injected)
        if length == 0:
            raise ContextError("the first prompt of a trajectory is empty")
        if length + max_new_tokens > self._max_model_tokens:
            raise ContextError(
                f"{length} tokens so far and max_new_tokens={max_new_tokens} exceed the {self._max_model_tokens} "
                "tokens that the engines can serve"
            )
        self.busy = True
        try:
            finish_reason = await self._take_turn(injected, max_new_tokens)
        finally:
            self.busy = False
        _, sampled = self._trajectory.turn(len(self._trajectory.turns) - 1)
        token_ids = [token for segment in sampled for token in segment.token_ids]
        logprobs = [logprob for segment in sampled for logprob in segment.logprobs]
        text = "" if self._tokenizer is None else self._tokenizer.decode(token_ids)
        return Completion(text, token_ids, logprobs, finish_reason)

    async def _take_turn(self, injected: list[int], max_new_tokens: int) -> FinishReason:
        """Append a turn to the trajectory: from the transcript as far as that goes, then from the engines."""
        trajectory, transcript = self._trajectory, self._transcript
        segments, turns = trajectory.segments, trajectory.turns
        before = len(segments)
        if transcript is not None and not transcript.is_over:
            # A call that is made beside this one must find it busy, as it would with engines.
            await asyncio.sleep(0)
        if transcript is None or not transcript.take_turn(trajectory, injected, max_new_tokens):
            turns.append(Turn(before, max_new_tokens))
            if injected:
                segments.append(Segment(injected, sampled=False))
        try:
            finish_reason = turns[-1].finish_reason
            if finish_reason is None:
                left = max_new_tokens - sum(len(segment.logprobs) for segment in segments[before:])
                finish_reason = await self._generate(trajectory, left) if left > 0 else "length"
        except BaseException:
            # A call that failed has said nothing, so that a rollout which tries again does not repeat its prompt.
            trajectory.rewind(before)
            del turns[-1]
            raise
        turns[-1] = Turn(before, max_new_tokens, finish_reason)
        if transcript is not None:
            transcript.turn_ended(trajectory)
        return finish_reason

    async def _say_nothing(self) -> Completion:
        self._unanswered += 1
        if self._unanswered > MAX_UNANSWERED:
            raise TruncatedError(
                f"the straggler policy has cut this trajectory short, and {MAX_UNANSWERED} calls since then got no "
                'answer; return a reward once finish_reason is "truncated"'
            )
        # A rollout that asks again and again must not keep the loop from everything else.
        await asyncio.sleep(0)
        return Completion("", [], [], "truncated")

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ContextError("the model folder has no tokenizer.json: give token ids instead of text")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


Rollout: TypeAlias = Callable[[TaskData, LLM], Awaitable[float]]
"""The user's function: plays one task with the policy and returns the reward."""


class Deadline:
    """When a rollout must have returned its reward. What engines that died have cost it does not count."""

    def __init__(self, timeout_s: float, outage: Outage) -> None:
        self.timeout_s = timeout_s
        self._outage = outage
        self._at_s = clock.now() + timeout_s - outage.total_s()

    def extend(self, seconds: float) -> None:
        """Give back time that was lost."""
        self._at_s += seconds

    async def wait_for(self, running: "asyncio.Future[float]") -> None:
        """Wait until it is done or the deadline has passed."""
        while not running.done() and (left_s := self._at_s + self._outage.total_s() - clock.now()) > 0:
            await asyncio.wait({running}, timeout=left_s)
            if self._outage.lasts:
                await done_or_set(running, self._outage.ended)


async def play(
    rollout: Rollout[TaskData], data: TaskData, llm: LLM, trajectory: Trajectory, deadline: Deadline
) -> None:
    """Run the user's function to its reward and write it on the trajectory.

    A function that ignores its cancellation is abandoned after ``CANCEL_GRACE_S``: it can delay nobody.

    Raises:
        RolloutError: no reward before the deadline, a reward that is not a finite number, or no sampled token.
        Exception: whatever the user's function raises.
    """
    running = asyncio.ensure_future(rollout(data, llm))
    try:
        await deadline.wait_for(running)
    except asyncio.CancelledError:
        await _cancel(running)
        raise
    finally:
        llm.close()
    if not running.done():
        await _cancel(running)
        raise RolloutTimeoutError(f"no reward after {deadline.timeout_s:g} s (rollout_timeout_s)")
    if running.cancelled():
        raise RolloutError("the rollout function cancelled itself")
    reward = _checked(running.result())
    if llm.busy:
        raise RolloutError("the rollout function returned while one of its generate calls was still running")
    if trajectory.sampled_tokens == 0:
        raise RolloutError("the rollout function returned without sampling a token, so there is nothing to train on")
    trajectory.reward = reward
    trajectory.finished_s = clock.now()


async def _cancel(running: "asyncio.Future[float]") -> None:
    running.cancel()
    await asyncio.wait({running}, timeout=CANCEL_GRACE_S)
    if running.done() and not running.cancelled():
        # Retrieved, so that asyncio does not report as lost an error that came too late to matter.
        running.exception()


def _checked(reward: object) -> float:
    # Whatever can be a float is a number here: `return answer == expected` is the most natural reward of all.
    try:
        number = float(reward) if isinstance(reward, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"the rollout function returned {reward!r}; a reward is a finite number")
    return number
