"""Counters that grow while a run goes on. They know no files and decide nothing."""

from collections import Counter, deque
from collections.abc import Callable
from statistics import fmean

from staleflow.statistics import StepRecord
from staleflow.types import TrainBatch

RATE_WINDOW_STEPS = 20


class IdleMeter:
    """Seconds during which nothing was running."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._running = 0
        self._idle_since: float | None = None
        self._idle_s = 0.0

    @property
    def running(self) -> int:
        """How many are running."""
        return self._running

    def begin(self) -> None:
        """Start the measurement."""
        self._idle_since = self._now() if self._running == 0 else None
        self._idle_s = 0.0

    def started(self) -> None:
        """One more is running."""
        self._idle_s = self.idle_s()
        self._idle_since = None
        self._running += 1

    def ended(self) -> None:
        """One fewer is running."""
        self._running -= 1
        if self._running == 0:
            self._idle_since = self._now()

    def idle_s(self) -> float:
        """Seconds idle since :meth:`begin`."""
        return self._idle_s + (0.0 if self._idle_since is None else self._now() - self._idle_since)


class StalenessMeter:
    """Staleness of every trained token, and of every trajectory by its oldest token."""

    def __init__(self) -> None:
        self.histogram: Counter[int] = Counter()
        self.trajectories = 0
        self.stale_trajectories = 0

    def add(self, batch: TrainBatch) -> tuple[int, float, int]:
        """Count a batch; returns its own minimum, mean and maximum."""
        counts: Counter[int] = Counter()
        for trajectory in batch.trajectories:
            gaps = [batch.step - version for version in trajectory.versions]
            counts.update(gaps)
            self.trajectories += 1
            self.stale_trajectories += max(gaps) > 0
        self.histogram += counts
        return min(counts), _mean(counts), max(counts)

    @property
    def mean(self) -> float:
        """Mean over all trained tokens; 0 before the first."""
        return _mean(self.histogram)

    @property
    def maximum(self) -> int:
        """Largest over all trained tokens; 0 before the first."""
        return max(self.histogram, default=0)


def _mean(histogram: Counter[int]) -> float:
    return sum(gap * count for gap, count in histogram.items()) / max(histogram.total(), 1)


class RecentSteps:
    """The last steps, for figures that should follow the run instead of averaging all of it."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=RATE_WINDOW_STEPS)

    def add(self, record: StepRecord) -> None:
        """Take in a step."""
        self._records.append(record)

    @property
    def reward_mean(self) -> float | None:
        """Mean reward; None before the first step."""
        return fmean(record.reward_mean for record in self._records) if self._records else None

    @property
    def staleness_mean(self) -> float:
        """Mean staleness; 0 before the first step."""
        return fmean(record.staleness_mean for record in self._records) if self._records else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second; 0 before the second step."""
        if len(self._records) < 2:
            return 0.0
        tokens = sum(record.sampled_tokens for record in self._records) - self._records[0].sampled_tokens
        seconds = self._records[-1].t - self._records[0].t
        return tokens / seconds if seconds > 0 else 0.0
