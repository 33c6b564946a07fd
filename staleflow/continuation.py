"""One ``generate`` call of a rollout, over as many requests as it takes.

Data flow. A trajectory and the number of tokens it wants come in; requests go to the fleet, one after another, until
one ends for good. What an interrupted one has brought stays in the trajectory as a segment, and is part of the next
one's prompt.
It knows neither which engine is best nor why one let go, only what that means for the call.

Invariant: the segments of a trajectory are, token by token, what engines have said; only a call that starts over takes
some back (``docs/design/engines.md``).
"""

from itertools import repeat

from staleflow import clock
from staleflow.errors import EngineError
from staleflow.events import Answered, Dropped, Interrupted, Requested
from staleflow.fleet import Answer, Fleet
from staleflow.recorder import Recorder
from staleflow.rollout import Deadline
from staleflow.store import TrajectoryStore
from staleflow.types import FinishReason, GenerateRequest, Interruption, Prefix, Segment, TaskData, Trajectory

MAX_FRUITLESS = 32
"""Interruptions in a row, deaths aside, that may bring no token."""


class Continuation:
    """Lets engines continue trajectories."""

    def __init__(self, fleet: Fleet, store: TrajectoryStore[TaskData], recorder: Recorder) -> None:
        self._fleet = fleet
        self._store = store
        self._recorder = recorder

    async def generate(
        self, trajectory: Trajectory, max_new_tokens: int, *, min_version: int, pinned: bool, deadline: Deadline
    ) -> FinishReason:
        """Append at most ``max_new_tokens`` sampled tokens to a trajectory; returns why they are not more.

        Raises what :meth:`Fleet.generate` raises, and :class:`EngineError` when it is interrupted again and again.
        """
        left, fruitless, recomputes = max_new_tokens, 0, False
        destination: int | None = None
        while True:
            answer = await self._ask(
                trajectory,
                left,
                min_version=min_version,
                pinned=pinned,
                destination=destination,
                prompt_logprobs=recomputes and trajectory.sampled_tokens > 0,
            )
            brought = len(answer.generation.token_ids)
            left -= brought
            if answer.why is None:
                return answer.generation.finish_reason
            if trajectory.truncated and not self._has_nothing(trajectory, answer):
                return "truncated"
            if left == 0:
                return "length"
            if answer.why is Interruption.DEATH:
                deadline.extend(clock.now() - answer.since_s)
            elif answer.why is Interruption.ABORT:
                self._fleet.discarded_tokens += trajectory.begin_turn_again()
                left = trajectory.turns[-1].max_new_tokens
            recomputes = answer.why is Interruption.RECOMPUTE or (recomputes and brought == 0)
            destination = answer.destination
            fruitless = _fruitless(fruitless, answer)

    async def _ask(
        self,
        trajectory: Trajectory,
        max_new_tokens: int,
        *,
        min_version: int,
        pinned: bool,
        destination: int | None,
        prompt_logprobs: bool,
    ) -> Answer:
        """Send one request and keep what it brings."""
        trajectory.requests += 1
        request_id = trajectory.newest_request_id
        self._recorder.event(Requested(self._recorder.t(), request_id))
        request = GenerateRequest(request_id, trajectory.token_ids, max_new_tokens, prompt_logprobs)
        try:
            answer = await self._fleet.generate(
                request, min_version=min_version, pinned=pinned, destination=destination
            )
        except BaseException:
            self._recorder.event(Dropped(self._recorder.t(), request_id))
            raise
        self._store.answered(trajectory)
        tokens = len(answer.generation.token_ids)
        if answer.why is None:
            self._recorder.event(Answered(self._recorder.t(), request_id, tokens))
        else:
            self._recorder.event(Interrupted(self._recorder.t(), request_id, tokens, answer.why))
        if tokens:
            _append(trajectory, answer)
        return answer

    def _has_nothing(self, trajectory: Trajectory, answer: Answer) -> bool:
        # An engine's death is no reason to score an empty trajectory.
        return answer.why is Interruption.DEATH and trajectory.sampled_tokens == 0


def _append(trajectory: Trajectory, answer: Answer) -> None:
    said = answer.generation
    if said.prompt_logprobs:
        sampled = [own for segment in trajectory.segments for own in repeat(segment.sampled, len(segment.token_ids))]
        # The first token of a prompt has no logprob, and is never one that was sampled.
        kept = [logprob for logprob, own in zip(said.prompt_logprobs, sampled[1:], strict=True) if own]
        trajectory.prefix = Prefix(said.versions[0], kept)
    if trajectory.first_segment_s is None:
        trajectory.first_segment_s = clock.now()
    trajectory.segments.append(Segment(said.token_ids, True, answer.engine, said.logprobs, said.versions))


def _fruitless(before: int, answer: Answer) -> int:
    """How many interruptions in a row have brought no token; raises :class:`EngineError` when they are too many."""
    if answer.generation.token_ids:
        return 0
    now = before if answer.why is Interruption.DEATH else before + 1
    if now >= MAX_FRUITLESS:
        raise EngineError(f"interrupted {now} times in a row without a token, the last time by engine {answer.engine}")
    return now
