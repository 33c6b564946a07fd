"""The settings of a run that belong to no single part."""

import math
from typing import Literal, TypeAlias, get_args

import msgspec

from staleflow.errors import ConfigError

StragglerAction: TypeAlias = Literal["replace", "truncate", "close_short"]
"""What to do about a group that a batch has waited for too long: abort it and let a fresh one take its place; end its
requests with the tokens sampled so far, so that its members can be scored; or complete it with the members that have
finished."""


class StragglerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a batch no longer waits for its last groups. Every use is counted, and biases the data against long work.

    A group that the action cannot help is left alone: it is replaced only if another task is at hand, truncated only if
    a request of it runs on an engine, and closed short only if two members have finished (one, in groups of one).

    Args:
        action: see :data:`StragglerAction`.
        patience_s: how often the policy is consulted while the trainer waits for a batch, and how old a group must be
            to be a straggler.
        max_blockers: nothing is done while the batch waits for more groups than this, and no more than this are
            hurried for one batch.
    """

    action: StragglerAction
    patience_s: float = 30.0
    max_blockers: int = 1

    def __post_init__(self) -> None:
        actions = get_args(StragglerAction)
        _require(self, "action", f"one of {', '.join(actions)}", ok=self.action in actions)
        _require(self, "patience_s", "above 0", ok=self.patience_s > 0)
        _require(self, "max_blockers", "at least 1", ok=isinstance(self.max_blockers, int) and self.max_blockers >= 1)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does and when it gives up.

    Args:
        steps: train steps; the run ends after the last one.
        batch_size: groups per train step.
        group_size: trajectories per group, all of one task; group-relative advantages need at least 2.
        max_staleness: hard bound, in published versions, on how old a sampled token may be when it is trained on.
            0 is synchronous training.
        rollout_timeout_s: a rollout that has not returned by then has failed.
        stall_warning_s: the run says so, with what everything waits for, when nothing has completed for so long, or its
            event loop has not run.
        max_attempts: a member whose rollout failed is played again until it has had this many attempts; then its
            group is aborted and another takes its place.
        extra_groups: groups admitted beyond ``batch_size`` for every batch. A batch is ready with any ``batch_size``
            complete groups, and what it leaves behind at its deadline expires: finished work may be thrown away.
        extra_members: members played beyond ``group_size`` in every group; the first ``group_size`` to finish count,
            the others are cancelled.
        engine_restarts: an engine that has died is started again so often, counted afresh once it has served for a good
            while; then it is given up. The run goes on with the others, and ends when none is left.
        no_engine_timeout_s: the run ends when no engine has served for so long.
        drain_timeout_s: in sync mode ``"drain"``, requests that have not ended by then go on after the sync.
        stragglers: what to do when a batch waits long for its last groups; None waits for them.
        max_failure_share: the run ends when more than this share of recent trajectories failed.
        evaluate_every_steps: play the held-out tasks once more after every so many steps, while training goes on;
            None for only before the first step and after the last.
        checkpoint_every_steps: save a checkpoint to resume from after every so many steps, after the last, and when
            the run is interrupted; None for none. Training stands still meanwhile, rollout goes on.
        keep_checkpoints: how many of the newest checkpoints stay, beside that of the best evaluation. With one alone,
            a step that ruins the model soon leaves none from before it.
    """

    steps: int
    batch_size: int = 32
    group_size: int = 8
    max_staleness: int = 2
    extra_groups: int = 0
    extra_members: int = 0
    engine_restarts: int = 3
    no_engine_timeout_s: float = 600.0
    drain_timeout_s: float = 60.0
    stragglers: StragglerPolicy | None = None
    rollout_timeout_s: float = 300.0
    stall_warning_s: float = 120.0
    max_attempts: int = 3
    max_failure_share: float = 0.5
    evaluate_every_steps: int | None = None
    checkpoint_every_steps: int | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        at_least_1 = ("steps", "batch_size", "group_size", "max_attempts", "keep_checkpoints")
        at_least_0 = ("max_staleness", "extra_groups", "extra_members", "engine_restarts")
        for name in (*at_least_1, *at_least_0):
            _require(self, name, "a whole number", ok=isinstance(getattr(self, name), int))
            least = 1 if name in at_least_1 else 0
            _require(self, name, f"at least {least}", ok=getattr(self, name) >= least)
        for name in ("rollout_timeout_s", "no_engine_timeout_s", "drain_timeout_s"):
            _require(self, name, "above 0", ok=getattr(self, name) > 0)
        _require(self, "stall_warning_s", "above 0, and finite", ok=0 < self.stall_warning_s < math.inf)
        _require(self, "max_failure_share", "between 0 and 1", ok=0 <= self.max_failure_share <= 1)
        for name in ("evaluate_every_steps", "checkpoint_every_steps"):
            every = getattr(self, name)
            _require(self, name, "a whole number, or None", ok=isinstance(every, int | None))
            _require(self, name, "at least 1, or None", ok=every is None or every >= 1)


def _require(settings: msgspec.Struct, name: str, allowed: str, *, ok: bool) -> None:
    if not ok:
        raise ConfigError(f"{name} is {getattr(settings, name)!r}; it must be {allowed}")
