import asyncio

import pytest

from staleflow.loop_lag import PERIOD_S, LoopLag
from staleflow.testing import run_virtually

STALL_S = 1.3


def test_no_sample_is_no_lag() -> None:
    assert LoopLag().quantile_ms(0.99) == 0.0


def test_quantiles() -> None:
    lag = LoopLag()
    for tenths in range(1, 101):
        lag.add(tenths * 1e-4)
    assert [lag.quantile_ms(share) for share in (0.01, 0.5, 0.99, 1.0)] == pytest.approx([0.1, 5.0, 9.9, 10.0])


def test_early_sample_counts_as_on_time() -> None:
    lag = LoopLag()
    lag.add(-0.003)
    assert lag.quantile_ms(1.0) == 0.0


def test_stall_counts_every_sample_it_has_swallowed() -> None:
    """A loop that stands still for half of the time is late half of the time, however seldom it says so."""
    lag = LoopLag()
    lag.add(STALL_S)
    for _ in range(round(STALL_S / PERIOD_S)):
        lag.add(0.0)
    assert lag.quantile_ms(1.0) == pytest.approx(STALL_S * 1e3)
    assert lag.quantile_ms(0.99) == pytest.approx(0.98 * STALL_S * 1e3, abs=2 * PERIOD_S * 1e3)
    assert lag.quantile_ms(0.75) == pytest.approx(0.5 * STALL_S * 1e3, abs=2 * PERIOD_S * 1e3)
    assert lag.quantile_ms(0.49) == 0.0


def test_run_samples_the_loop_until_it_is_cancelled() -> None:
    lag = LoopLag()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await lag.run()

    run_virtually(main())
    assert lag._samples.total() == pytest.approx(1.0 / PERIOD_S, abs=1)
    assert lag.quantile_ms(1.0) == 0.0
