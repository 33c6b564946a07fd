"""The plan of ``make chaos-resume``: kills at random moments, and none that a job could miss."""

from collections import Counter

import pytest
from soak.plan import LAST_SHARE, LONGEST_DELAY_S, Kill, Moment, Victim, plan


def planned(kills: int = 20, steps: int = 900, seed: int = 1) -> list[Kill]:
    return plan(kills, steps=steps, evaluate_every_steps=100, seed=seed)


def test_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert planned(seed=3) == planned(seed=3) != planned(seed=4)


@pytest.mark.parametrize("seed", range(20))
def test_victims_and_moments_come_about_equally_often(seed: int) -> None:
    kills = planned(seed=seed)
    assert set(Counter(kill.moment for kill in kills).values()) == {5}
    assert set(Counter(kill.victim for kill in kills).values()) <= {6, 7}
    assert {kill.victim for kill in kills} == set(Victim)


@pytest.mark.parametrize("seed", range(20))
def test_kills_are_due_one_after_another_while_the_job_works(seed: int) -> None:
    kills = planned(seed=seed)
    steps = [kill.step for kill in kills if kill.moment is not Moment.START_UP]
    assert steps == sorted(steps)
    assert 1 <= steps[0] < steps[-1] < LAST_SHARE * 900
    assert all(kill.step % 100 == 0 for kill in kills if kill.moment is Moment.EVALUATION)
    assert len({kill.step for kill in kills if kill.moment is Moment.EVALUATION}) == 5
    assert all(0 <= kill.delay_s <= LONGEST_DELAY_S[kill.moment] for kill in kills)


@pytest.mark.parametrize("kills", range(1, 9))
def test_job_too_short_to_be_evaluated_is_killed_in_training_instead(kills: int) -> None:
    moments = Counter(kill.moment for kill in planned(kills, steps=50))
    assert moments.total() == kills
    assert moments[Moment.EVALUATION] == 0
