"""When failed rollouts are no longer bad luck: the share of recent trajectories that may fail."""

from collections import Counter, deque

from staleflow.errors import TooManyFailuresError

RECENT_TRAJECTORIES = 256
FEWEST_TRAJECTORIES = 32


class FailureLimit:
    """Counts failures by cause and raises once their share of recent trajectories passes ``max_share``."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._recent: deque[bool] = deque(maxlen=RECENT_TRAJECTORIES)
        self._first: tuple[Exception, str] | None = None
        self.by_cause: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Failures since the start."""
        return self.by_cause.total()

    def succeeded(self) -> None:
        """A trajectory has its reward."""
        self._recent.append(False)

    def failed(self, error: Exception, where: str) -> None:
        """A trajectory failed; raises :class:`TooManyFailuresError` from the run's first failure at the limit."""
        self.by_cause[type(error).__name__] += 1
        if self._first is None:
            self._first = (error, where)
        self._recent.append(True)
        failures = sum(self._recent)
        if len(self._recent) >= FEWEST_TRAJECTORIES and failures > self._max_share * len(self._recent):
            first, first_where = self._first
            raise TooManyFailuresError(
                f"{failures} of the last {len(self._recent)} trajectories failed (max_failure_share is "
                f"{self._max_share:g}); the first to fail was {first_where}: {type(first).__name__}: {first}"
            ) from first
