"""Which version sampled a token, by the time at which its decode step ended."""

import pytest

pytest.importorskip("torch")

from staleflow.engines.embedded_server import VersionHistory

pytestmark = pytest.mark.torch


def history(*swaps: tuple[int, float]) -> VersionHistory:
    result = VersionHistory()
    for version, at in swaps:
        result.swapped(version, at)
    return result


def test_before_any_swap_everything_is_version_0() -> None:
    assert history().current == 0
    assert history().of(3, [1.0, 2.0, 3.0], oldest=0) == [0, 0, 0]


def test_step_belongs_to_the_last_swap_before_it_ended() -> None:
    swapped = history((1, 10.0))
    assert swapped.current == 1
    assert swapped.of(4, [9.0, 9.999, 10.0, 10.001], oldest=0) == [0, 0, 1, 1]


def test_several_swaps_within_one_request() -> None:
    """Versions may be skipped: an engine pulls the newest one."""
    swapped = history((1, 10.0), (4, 20.0), (6, 20.5))
    assert swapped.current == 6
    assert swapped.of(6, [5.0, 15.0, 19.0, 20.2, 20.5, 99.0], oldest=0) == [0, 1, 1, 4, 6, 6]


def test_tokens_that_lost_their_times_are_as_old_as_their_request() -> None:
    """Never younger than they are, and it is the first tokens that have none."""
    swapped = history((1, 10.0), (2, 20.0), (3, 30.0))
    assert swapped.of(5, [25.0, 35.0], oldest=1) == [1, 1, 1, 2, 3]
    assert swapped.of(2, [], oldest=2) == [2, 2]
