"""How late the controller's event loop is: the time by which a short sleep overshoots."""

import asyncio
from collections import Counter

from staleflow import clock

PERIOD_S = 0.01
RESOLUTION_S = 1e-4


class LoopLag:
    """Samples the lag of the running loop into a histogram of fixed resolution."""

    def __init__(self) -> None:
        self._samples: Counter[int] = Counter()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            due = clock.now() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.add(clock.now() - due)

    def add(self, lag_s: float) -> None:
        """Count one overshoot, and every sample that the loop was too late to take meanwhile."""
        self._samples[round(max(lag_s, 0.0) / RESOLUTION_S)] += 1
        while (lag_s := lag_s - PERIOD_S) > 0:
            self._samples[round(lag_s / RESOLUTION_S)] += 1

    def quantile_ms(self, share: float) -> float:
        """Lag in milliseconds that ``share`` of the samples do not exceed; 0 before the first sample."""
        remaining = share * self._samples.total()
        for lag, count in sorted(self._samples.items()):
            remaining -= count
            if remaining <= 0:
                return lag * RESOLUTION_S * 1e3
        return 0.0
