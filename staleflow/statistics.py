"""What is known of a run, as frozen records.

All staleness figures count sampled tokens, each with ``consuming batch - version that sampled it``, so the time a
finished group waits for its batch is part of it. Durations are in seconds.
"""

import msgspec

from staleflow.types import StepMetrics


class StepRecord(msgspec.Struct, frozen=True):
    """One line of ``metrics.jsonl``; durations in seconds, the step's own.

    ``trainer_wait_s`` is how long the trainer waited for this batch; ``rollout_wait_s`` is how long, since the step
    before, no engine had anything to do. ``accuracy`` is that of the newest evaluation that has ended, of
    ``accuracy_version``.
    """

    step: int
    t: float
    reward_mean: float
    staleness_min: int
    staleness_mean: float
    staleness_max: int
    sampled_tokens: int
    trainer_wait_s: float
    rollout_wait_s: float
    train_s: float
    publish_s: float
    metrics: StepMetrics
    accuracy: float | None = None
    accuracy_version: int | None = None


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out tasks played by one version, that of ``step``: mean reward, where a failed rollout earns 0.

    ``versions`` are the oldest and the newest that the engines have reported of its tokens: twice ``step``, unless none
    was sampled. ``failures`` are by cause. Nothing of an evaluation is counted anywhere else.
    """

    step: int
    reward_mean: float
    tasks: int
    failed: int
    versions: tuple[int, int]
    failures: dict[str, int] = {}
    sampled_tokens: int = 0
    duration_s: float = 0.0


class EvaluationProgress(msgspec.Struct, frozen=True):
    """An evaluation that goes on: of which version, and how many of its tasks have been played and have failed."""

    version: int
    tasks: int
    played: int
    failed: int


class Accounting(msgspec.Struct, frozen=True):
    """Where every admitted group and every started trajectory has gone.

    The accounting law: ``admitted = trained + filtered + aborted + expired + running + complete + leased``, the
    filtered and aborted ones by reason. ``failed_attempts`` counts trajectories by cause; each was played again
    or ended with its group. ``closed_short`` groups and ``truncated`` trajectories are uses of the straggler policy,
    and are counted in the other terms as well; those that it has replaced are aborted as ``"straggler"``.
    """

    admitted: int
    trained: int
    filtered: dict[str, int]
    aborted: dict[str, int]
    expired: int
    running: int
    complete: int
    leased: int
    holds: bool
    late_completions: int
    failed_attempts: dict[str, int]
    closed_short: int
    truncated: int


class FleetStatistics(msgspec.Struct, frozen=True):
    """How the engines are, and what has happened to them, before a resume as well.

    ``serving`` have confirmed a version and live, ``retired`` never come back in this process. ``deaths`` counts failed
    starts and failed weight updates as well. ``interrupted`` counts requests that an engine has let go of, by why
    (:class:`staleflow.types.Interruption`); ``discarded_tokens`` were sampled for calls that had to start over.
    """

    serving: int
    deaths: int
    restarts: int
    retired: int
    interrupted: dict[str, int]
    discarded_tokens: int


NOTHING_HAPPENED = FleetStatistics(0, 0, 0, 0, {}, 0)
"""Of engines that have yet to start."""


class PipelineStatistics(msgspec.Struct, frozen=True):
    """The state of a run at one moment; ``Pipeline.statistics()``; token counts are as in :class:`Report`.

    ``accuracy`` is that of the newest evaluation that has ended, of ``accuracy_version``; ``skipped_updates`` were not
    finite.
    """

    phase: str
    step: int
    steps: int
    elapsed_s: float
    reward_mean: float | None
    accuracy: float | None
    staleness_mean: float
    staleness_max: int
    trainer_wait_share: float
    rollout_wait_share: float
    tokens_per_s: float
    live_groups: int
    running_requests: int
    waiting_requests: int
    failed_attempts: int
    loop_lag_p99_ms: float
    fleet: FleetStatistics
    reused_tokens: int = 0
    dropped_tokens: int = 0
    accuracy_version: int | None = None
    evaluation: EvaluationProgress | None = None
    skipped_updates: int = 0


class Report(msgspec.Struct, frozen=True):
    """What came of a run.

    ``ended`` says why it did: all steps done, or the task source had no more. The accuracies are the mean rewards of
    the held-out tasks, which is the share of right answers where a reward is 0 or 1; ``held_out_failures`` counts the
    rollouts among them that failed and so earned 0, ``held_out_tokens`` what was sampled for all of them.
    ``reused_tokens`` were sampled before a resume and used after it, each counting once per resume; ``dropped_tokens``
    could not be used because a rollout went another way. ``skipped_updates`` counts optimizer updates that were not
    finite and so were not made; their groups count as trained.
    """

    ended: str
    steps: int
    wall_s: float
    accuracy_before: float | None
    accuracy_after: float | None
    held_out_failures: int
    staleness_max: int
    staleness_mean: float
    staleness_histogram: dict[int, int]
    stale_trajectories: int
    trained_trajectories: int
    trained_tokens: int
    trainer_wait_s: float
    rollout_wait_s: float
    loop_lag_p99_ms: float
    accounting: Accounting
    fleet: FleetStatistics
    run_dir: str
    reused_tokens: int = 0
    dropped_tokens: int = 0
    held_out_tokens: int = 0
    skipped_updates: int = 0
