"""What crosses from one stage to the next: tasks, generations, segments, trajectories, groups.

All of it is data. Per token a record keeps four things: token id, behaviour logprob, policy version, and whether
the policy sampled it or the environment injected it (``docs/glossary.md``).
"""

from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

TaskData = TypeVar("TaskData")

FinishReason: TypeAlias = Literal["stop", "length", "truncated", "interrupted"]
"""Why an engine stopped: it sampled an end token, it reached ``max_new_tokens``, it was told to end the request early,
or it let go of a request that is to go on elsewhere or later."""


class Task(msgspec.Struct, Generic[TaskData], frozen=True):
    """One item of a task source. ``id`` counts the items handed out, from 0, and never repeats."""

    id: int
    data: TaskData


class GenerateRequest(msgspec.Struct, frozen=True):
    """Ask an engine to continue ``token_ids`` by at most ``max_new_tokens``."""

    request_id: str
    token_ids: list[int]
    max_new_tokens: int


class Generation(msgspec.Struct, frozen=True):
    """An engine's answer; the three lists have one entry per sampled token, the end token included.

    ``logprobs`` are those of the distribution that was really sampled from (after temperature); ``versions`` are
    what the engine reports, token by token, not what the controller believed.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


class Segment(msgspec.Struct, frozen=True):
    """Consecutive tokens of one origin: sampled by one engine, or injected by the environment.

    ``logprobs`` and ``versions`` have one entry per token when sampled and are empty when injected.
    """

    token_ids: list[int]
    sampled: bool
    engine: int | None = None
    logprobs: list[float] = []
    versions: list[int] = []


class Trajectory(msgspec.Struct):
    """One member of a group: everything the policy saw and said for one task, and what it earned.

    Times are seconds on the controller's clock, of admission, of the first sampled segment's arrival and of the reward.
    They are three on purpose: a trajectory stamped only when it was admitted looks older than it is, one stamped only
    when it finished looks younger. ``requests`` counts those sent to engines, whatever came of them. ``truncated``
    says that the straggler policy has cut it short.
    """

    task: int
    group: int
    member: int
    attempt: int
    admitted_s: float
    segments: list[Segment] = []
    requests: int = 0
    first_segment_s: float | None = None
    finished_s: float | None = None
    reward: float | None = None
    truncated: bool = False

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
    def sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.sampled)


class TrainBatch(msgspec.Struct, frozen=True):
    """What one train step consumes: whole groups, in the order of the lease."""

    step: int
    groups: list[list[Trajectory]]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All members of all groups, in order."""
        return [trajectory for group in self.groups for trajectory in group]


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


class StepMetrics(msgspec.Struct, frozen=True):
    """What the trainer measured in one step.

    ``loss`` is the mean over the step's optimizer updates, ``gradient_norm`` their maximum. ``tokens`` counts all
    sampled tokens of the batch, ``measured_tokens`` those that had to be computed: where the loss allows it,
    trajectories without an advantage are left out. All that follows is over the measured ones, each token counting
    once, and 0 or empty when there is none.

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
    reference_k3: float | None = None
