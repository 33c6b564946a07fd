"""What crosses from one stage to the next: tasks, generations, segments, trajectories, groups.

All of it is data. Per token a record keeps four things: token id, behaviour logprob, policy version, and whether
the policy sampled it or the environment injected it (``docs/glossary.md``).
"""

from enum import StrEnum
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

TaskData = TypeVar("TaskData")

FinishReason: TypeAlias = Literal["stop", "length", "truncated", "interrupted"]
"""Why sampling stopped: at an end token, at ``max_new_tokens``, because the straggler policy has cut the trajectory
short, or because the engine let go of a request, which is to go on elsewhere or later. No engine says ``"truncated"``,
no rollout sees ``"interrupted"``."""

SyncMode: TypeAlias = Literal["keep", "recompute", "drain", "abort"]
"""What a weight update does to running requests: they go on over their cache; go on with their tokens computed anew;
finish first; or start over (``docs/design/engines.md``)."""


class Interruption(StrEnum):
    """Why an engine let go of a request."""

    TRUNCATE = "truncate"
    """The straggler policy wants no more of it."""
    RECOMPUTE = "recompute"
    """The engine syncs, and the rest is to be sampled over a cache of the new weights."""
    DRAIN = "drain"
    """The engine syncs, and the request did not end in time."""
    ABORT = "abort"
    """The engine syncs, and the call is to start over."""
    MIGRATE = "migrate"
    """Another engine is to go on with it."""
    DEATH = "death"
    """The engine died; the tokens it had sampled are lost."""
    ENGINE = "engine"
    """The engine did so by itself."""


class Task(msgspec.Struct, Generic[TaskData], frozen=True):
    """One item of a task source. ``id`` counts the items handed out, from 0, and never repeats."""

    id: int
    data: TaskData


class GenerateRequest(msgspec.Struct, frozen=True):
    """Ask an engine to continue ``token_ids`` by at most ``max_new_tokens``.

    ``prompt_logprobs`` asks for the logprobs of ``token_ids`` too, under the weights that prefill them.
    """

    request_id: str
    token_ids: list[int]
    max_new_tokens: int
    prompt_logprobs: bool = False


class Generation(msgspec.Struct, frozen=True):
    """An engine's answer; the three lists have one entry per sampled token, the end token included.

    ``logprobs`` are those of the distribution that was really sampled from (after temperature); ``versions`` are
    what the engine reports, token by token, not what the controller believed. ``prompt_logprobs`` has one entry per
    prompt token after the first, under the weights that sampled the first token; it is empty unless it was asked for,
    and where the engine cannot give it.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    prompt_logprobs: list[float] = []


class Segment(msgspec.Struct, frozen=True):
    """Consecutive tokens of one origin: sampled by one engine, or injected by the environment.

    ``logprobs`` and ``versions`` have one entry per token when sampled and are empty when injected.
    """

    token_ids: list[int]
    sampled: bool
    engine: int | None = None
    logprobs: list[float] = []
    versions: list[int] = []


class Turn(msgspec.Struct, frozen=True):
    """One call of ``llm.generate``: an injected segment unless the call said nothing, and what was sampled after it.

    ``first_segment`` is where in the trajectory it begins; it goes up to the next turn. ``finish_reason`` is None while
    sampling has not ended.
    """

    first_segment: int
    max_new_tokens: int
    finish_reason: FinishReason | None = None


class Prefix(msgspec.Struct, frozen=True):
    """How the weights of ``version`` see the first tokens that a trajectory has sampled: a logprob each, in order."""

    version: int
    logprobs: list[float]


class Trajectory(msgspec.Struct):
    """One member of a group: everything the policy saw and said for one task, and what it earned.

    Times are seconds on the controller's clock, of admission, of the first sampled segment's arrival and of the reward.
    They are three on purpose: a trajectory stamped only when it was admitted looks older than it is, one stamped only
    when it finished looks younger. ``requests`` counts those this attempt has sent to engines, whatever came of them.
    ``truncated`` says that the straggler policy has cut it short. ``prefix`` is of the newest sync in mode
    ``recompute``; the behaviour logprobs in the segments stay what they were.
    """

    task: int
    group: int
    member: int
    attempt: int
    admitted_s: float
    segments: list[Segment] = []
    turns: list[Turn] = []
    requests: int = 0
    first_segment_s: float | None = None
    finished_s: float | None = None
    reward: float | None = None
    truncated: bool = False
    prefix: Prefix | None = None

    @property
    def newest_request_id(self) -> str:
        """Id of the request that was sent to an engine last, unique in the run; of no request before the first."""
        return f"{self.group}.{self.member}.{self.attempt}.{self.requests - 1}"

    @property
    def token_ids(self) -> list[int]:
        """All tokens, in order."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def versions(self) -> list[int]:
        """Policy version of every *sampled* token, in order."""
        return [version for segment in self.segments for version in segment.versions]

    @property
    def trained_segments(self) -> list[Segment]:
        """Everything up to the last sampled segment; what the environment says after it is not computed."""
        last = max((index for index, segment in enumerate(self.segments) if segment.sampled), default=-1)
        return self.segments[: last + 1]

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.sampled)

    def turn(self, index: int) -> tuple[list[int], list[Segment]]:
        """The tokens that a turn injected, and the segments that were sampled in it."""
        begin, end = self.turns[index].first_segment, None
        if index + 1 < len(self.turns):
            end = self.turns[index + 1].first_segment
        segments = self.segments[begin:end]
        injected = [token for segment in segments if not segment.sampled for token in segment.token_ids]
        return injected, [segment for segment in segments if segment.sampled]

    def begin_turn_again(self) -> int:
        """Forget what was sampled in the newest turn; returns how many tokens that was."""
        injected, sampled = self.turn(len(self.turns) - 1)
        self.rewind(self.turns[-1].first_segment + (1 if injected else 0))
        return sum(len(segment.token_ids) for segment in sampled)

    def rewind(self, segments: int) -> None:
        """Forget everything after the first so many segments."""
        del self.segments[segments:]
        sampled = self.sampled_tokens
        if sampled == 0:
            self.first_segment_s = None
        if self.prefix is not None:
            self.prefix = Prefix(self.prefix.version, self.prefix.logprobs[:sampled]) if sampled else None


class TrainBatch(msgspec.Struct, frozen=True):
    """What one train step consumes: whole groups, in the order of the lease."""

    step: int
    groups: list[list[Trajectory]]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All members of all groups, in order."""
        return [trajectory for group in self.groups for trajectory in group]


class ModelLimits(msgspec.Struct, frozen=True):
    """What a model can be given: token ids below ``vocabulary``, sequences of at most ``max_tokens``.

    None stands for what is not known, or has no limit.
    """

    vocabulary: int | None = None
    max_tokens: int | None = None


class RatioMoments(msgspec.Struct, frozen=True):
    """A probability ratio over tokens: mean, mean square, and effective sample size as a share of the tokens."""

    mean: float = 0.0
    second_moment: float = 0.0
    effective_share: float = 0.0


class CutShare(msgspec.Struct, frozen=True):
    """Of so many tokens, the share that the loss has masked, clipped or given a capped weight."""

    tokens: int
    share: float


class Agreement(msgspec.Struct, frozen=True):
    """How the trainer's logprobs agree with the engines' where both have the same weights.

    Over the tokens of trajectories that are of the newest version throughout. With *gap* the trainer's logprob minus
    the engine's: ``ratio_mean`` is the mean of ``exp(gap)``; ``slope`` and ``residual_rms`` are of the straight line
    that best gives the trainer's logprobs from the engine's, and ``correlation`` is between them.
    """

    tokens: int
    ratio_mean: float
    gap_mean: float
    gap_rms: float
    slope: float
    residual_rms: float
    correlation: float


class Attempt(msgspec.Struct, frozen=True):
    """Which attempt of which member of which group, and of which task."""

    task: int
    group: int
    member: int
    attempt: int


class SkippedUpdate(msgspec.Struct, frozen=True):
    """An optimizer update that was not made because it was not finite.

    ``update`` counts those of the step from 0, ``offenders`` are the trajectories to blame. ``dump`` is the file that
    has all of them, or says why there is none.
    """

    update: int
    reason: str
    offenders: list[Attempt]
    dump: str


class StepMetrics(msgspec.Struct, frozen=True):
    """What the trainer measured in one step.

    ``loss`` is the mean over the optimizer updates that were made, ``gradient_norm`` their maximum. ``skipped_updates``
    counts those that were not finite and so were not made, ``skipped`` says what is known of each.
    ``updates_without_gradient`` counts those that had nothing to learn and so moved nothing, not even by weight decay.
    ``tokens`` counts all sampled tokens of the batch, ``measured_tokens`` those that had to be computed: where the loss
    allows it, trajectories without an advantage are left out. All that follows is over the measured ones, each token
    counting once, and 0 or empty when there is none.

    ``behaviour_ratio`` is of the policy at the start of the step to the one that sampled, ``policy_ratio`` of the
    policy being trained to the one that sampled. ``k1`` and ``k3`` estimate how far the data is from the policy at the
    start of the step: the means of ``-d`` and of ``exp(d) - 1 - d``, with ``d`` the log of the former ratio. With
    several updates and a loss that does not need that policy, these three are of the first update. ``reference_k3``
    estimates in the same way how far the policy being trained is from the reference model, and is None without one.

    ``cut_by_staleness`` has the staleness of a token as key. ``cut_by_length`` divides trajectories by length into
    tenths; its key is the longest of each, in sampled tokens, and trajectories of one length are never divided.
    """

    loss: float
    gradient_norm: float
    tokens: int
    measured_tokens: int = 0
    entropy: float = 0.0
    cut_share: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    behaviour_ratio: RatioMoments = RatioMoments()
    policy_ratio: RatioMoments = RatioMoments()
    cut_by_staleness: dict[int, CutShare] = {}
    cut_by_length: dict[int, CutShare] = {}
    agreement: Agreement | None = None
    skipped_updates: int = 0
    skipped: list[SkippedUpdate] = []
    updates_without_gradient: int = 0
    reference_k3: float | None = None
