import pytest

from staleflow.blockers import Activity, Member, blocker, prevailing


@pytest.mark.parametrize(
    ("member", "sentence"),
    [
        (Member(Activity.RUNNING, 14.2, 2), "batch 41 waits for group 812: member 3 running on engine 2 since 14.2 s"),
        (Member(Activity.QUEUED, 0.0), "batch 41 waits for group 812: member 3 waiting for an engine since 0.0 s"),
        (
            Member(Activity.IN_ROLLOUT, 7.0),
            "batch 41 waits for group 812: member 3 in the rollout function since 7.0 s",
        ),
    ],
)
def test_blocker_is_a_sentence(member: Member, sentence: str) -> None:
    assert str(blocker(41, 812, {3: member})) == sentence


def test_blocker_is_about_the_member_that_has_been_longest_at_what_most_do() -> None:
    rewarded = Member(Activity.IN_ROLLOUT, 1.0)
    found = blocker(0, 1, {0: rewarded, 1: Member(Activity.RUNNING, 9.0, 0), 2: Member(Activity.RUNNING, 8.0, 1)})
    assert (found.member, found.what, found.engine, found.since_s) == (2, Activity.RUNNING, 1, 8.0)


def test_first_member_wins_a_tie_of_time() -> None:
    assert blocker(0, 1, {5: Member(Activity.QUEUED, 1.0), 2: Member(Activity.QUEUED, 1.0)}).member == 2


@pytest.mark.parametrize(
    ("counts", "most"),
    [((2, 2, 2), Activity.RUNNING), ((1, 2, 2), Activity.QUEUED), ((1, 2, 3), Activity.IN_ROLLOUT)],
)
def test_ties_are_broken_in_the_order_of_activities(counts: tuple[int, int, int], most: Activity) -> None:
    assert prevailing(dict(zip(Activity, counts, strict=True))) is most
