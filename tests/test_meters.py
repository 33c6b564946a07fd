import pytest

from staleflow.meters import RATE_WINDOW_STEPS, IdleMeter, RecentSteps, StalenessMeter
from staleflow.statistics import StepRecord
from staleflow.types import Segment, StepMetrics, TrainBatch, Trajectory

# -- idle --------------------------------------------------------------------------------------------------------


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s


def test_idle_is_when_nothing_runs() -> None:
    clock = FakeClock()
    meter = IdleMeter(clock.now)
    meter.begin()
    clock.time_s = 103.0
    assert meter.idle_s() == 3.0, "counted while it goes on"
    meter.started()
    meter.started()
    clock.time_s = 110.0
    meter.ended()
    clock.time_s = 120.0
    assert (meter.running, meter.idle_s()) == (1, 3.0)
    meter.ended()
    clock.time_s = 125.0
    assert (meter.running, meter.idle_s()) == (0, 8.0)
    meter.started()
    clock.time_s = 200.0
    assert meter.idle_s() == 8.0


def test_idle_before_the_measurement_does_not_count() -> None:
    clock = FakeClock()
    meter = IdleMeter(clock.now)
    meter.started()
    meter.ended()
    clock.time_s = 150.0
    meter.started()
    clock.time_s = 160.0
    meter.begin()
    clock.time_s = 170.0
    assert meter.idle_s() == 0.0, "one was running when the measurement began"
    meter.ended()
    clock.time_s = 171.0
    assert meter.idle_s() == 1.0


# -- staleness ---------------------------------------------------------------------------------------------------


def trajectory(*segments: list[int]) -> Trajectory:
    """One prompt token, then a segment per list of versions."""
    sampled = [Segment([5] * len(versions), True, 0, [-1.0] * len(versions), versions) for versions in segments]
    return Trajectory(0, 1, 0, 0, 0.0, [Segment([9], sampled=False), *sampled])


def test_V16_staleness_is_minimum_mean_and_maximum_over_sampled_tokens() -> None:
    meter = StalenessMeter()
    batch = TrainBatch(7, [[trajectory([7]), trajectory([5, 5], [7, 7, 7])], [trajectory([7, 7])]])
    assert meter.add(batch) == (0, 2 * 2 / 8, 2)
    assert meter.histogram == {0: 6, 2: 2}
    # Its newest token is not stale and most of it is not: the oldest one decides.
    assert (meter.stale_trajectories, meter.trajectories) == (1, 3)


def test_staleness_adds_up_but_each_batch_has_its_own_figures() -> None:
    meter = StalenessMeter()
    assert (meter.mean, meter.maximum) == (0.0, 0)
    assert meter.add(TrainBatch(3, [[trajectory([0])]])) == (3, 3.0, 3)
    assert meter.add(TrainBatch(4, [[trajectory([4, 4, 3, 3])]])) == (0, 0.5, 1)
    assert (meter.mean, meter.maximum) == ((3 + 2) / 5, 3)
    assert meter.histogram == {0: 2, 1: 2, 3: 1}
    assert (meter.stale_trajectories, meter.trajectories) == (2, 2)


# -- recent steps ------------------------------------------------------------------------------------------------


def record(step: int, *, t: float, tokens: int = 0, reward: float = 0.0, staleness: float = 0.0) -> StepRecord:
    return StepRecord(
        step=step,
        t=t,
        reward_mean=reward,
        staleness_min=0,
        staleness_mean=staleness,
        staleness_max=0,
        sampled_tokens=tokens,
        trainer_wait_s=0.0,
        rollout_wait_s=0.0,
        train_s=0.0,
        publish_s=0.0,
        metrics=StepMetrics(0.0, 0.0, tokens),
    )


def test_nothing_is_known_before_the_first_step() -> None:
    recent = RecentSteps()
    assert (recent.reward_mean, recent.staleness_mean, recent.tokens_per_s) == (None, 0.0, 0.0)


def test_rate_is_of_the_tokens_between_the_first_step_and_the_last() -> None:
    recent = RecentSteps()
    recent.add(record(0, t=50.0, tokens=10_000))
    assert recent.tokens_per_s == 0.0, "one step has no duration"
    recent.add(record(1, t=52.0, tokens=300))
    recent.add(record(2, t=54.0, tokens=100))
    assert recent.tokens_per_s == pytest.approx(400 / 4)


def test_figures_follow_the_last_steps() -> None:
    recent = RecentSteps()
    for step in range(50):
        recent.add(record(step, t=float(step), tokens=1_000_000, reward=1.0, staleness=9.0))
    for step in range(RATE_WINDOW_STEPS):
        recent.add(record(50 + step, t=50.0 + 2 * step, tokens=60, reward=0.25, staleness=0.5))
    assert recent.reward_mean == pytest.approx(0.25)
    assert recent.staleness_mean == pytest.approx(0.5)
    assert recent.tokens_per_s == pytest.approx(30)
