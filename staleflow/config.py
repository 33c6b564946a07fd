"""The settings of a run that belong to no single part."""

import msgspec

from staleflow.errors import ConfigError


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does and when it gives up.

    Args:
        steps: train steps; the run ends after the last one.
        batch_size: groups per train step.
        group_size: trajectories per group, all of one task; group-relative advantages need at least 2.
        max_staleness: hard bound, in published versions, on how old a sampled token may be when it is trained on.
            0 is synchronous training.
        rollout_timeout_s: a rollout that has not returned by then has failed.
        max_attempts: a member whose rollout failed is played again until it has had this many attempts; then its
            group is aborted and another takes its place.
        max_failure_share: the run ends when more than this share of recent trajectories failed.
        evaluate_every_steps: play the held-out tasks once more after every so many steps, while training goes on;
            None for only before the first step and after the last.
    """

    steps: int
    batch_size: int = 32
    group_size: int = 8
    max_staleness: int = 2
    rollout_timeout_s: float = 300.0
    max_attempts: int = 3
    max_failure_share: float = 0.5
    evaluate_every_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "group_size", "max_staleness", "max_attempts", "evaluate_every_steps"):
            value, optional = getattr(self, name), name == "evaluate_every_steps"
            self._require(name, "a whole number", ok=isinstance(value, int) or (optional and value is None))
        for name in ("steps", "batch_size", "group_size", "max_attempts"):
            self._require(name, "at least 1", ok=getattr(self, name) >= 1)
        self._require("max_staleness", "at least 0", ok=self.max_staleness >= 0)
        self._require("rollout_timeout_s", "above 0", ok=self.rollout_timeout_s > 0)
        self._require("max_failure_share", "between 0 and 1", ok=0 <= self.max_failure_share <= 1)
        every = self.evaluate_every_steps
        self._require("evaluate_every_steps", "at least 1, or None", ok=every is None or every >= 1)

    def _require(self, name: str, allowed: str, *, ok: bool) -> None:
        if not ok:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")
