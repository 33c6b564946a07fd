"""What crosses from one stage to the next: tasks, generations, segments, trajectories, groups.

All of it is data. Per token a record keeps four things: token id, behaviour logprob, policy version, and whether
the policy sampled it or the environment injected it (``docs/glossary.md``).
"""

from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

TaskData = TypeVar("TaskData")

FinishReason: TypeAlias = Literal["stop", "length", "truncated"]
"""Why an engine stopped: it sampled an end token, it reached ``max_new_tokens``, or it was told to stop early."""


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


class StepMetrics(msgspec.Struct, frozen=True):
    """What the trainer measured in one step.

    ``loss`` is the mean over all sampled ``tokens`` of the batch. ``entropy``, ``clipped_share`` and ``policy_lag_kl``
    are means over those with an advantage, the only ones that are computed; 0 when there is none.

    ``policy_lag_kl`` is the mean of ``exp(d) - 1 - d`` with ``d`` the trainer's logprob before
    the step minus the behaviour logprob (the k3 estimator): how far the data is from the policy that trains on it.
    With several minibatches it is that of the first, since the others see weights the step has already changed.
    """

    loss: float
    gradient_norm: float
    entropy: float
    clipped_share: float
    policy_lag_kl: float
    tokens: int
