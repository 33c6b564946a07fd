"""What a batch waits for, in a sentence that a person understands.

Data flow: the ledger names the groups that block a batch; whoever knows what their members are doing gets a
:class:`Blocker` from :func:`blocker`. It knows neither a running pipeline nor a run folder, so both can use it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import assert_never

import msgspec


class Activity(StrEnum):
    """What an unfinished member of a group is doing. The order is the order of ties."""

    RUNNING = "running"
    """An engine has its request."""
    QUEUED = "queued"
    """Its request waits for an engine."""
    IN_ROLLOUT = "in_rollout"
    """It is in the user's rollout function and waits for no token: environment, tools, reward."""


_IN_ORDER = tuple(Activity)


class Member(msgspec.Struct, frozen=True):
    """An unfinished member: what it is doing, since when, and on which engine if it is running."""

    what: Activity
    since_s: float
    engine: int | None = None


class Blocker(msgspec.Struct, frozen=True):
    """A group that must finish before a batch can be trained, and the member of it that has been at it longest.

    ``since_s`` is on the clock of the run: seconds since its start.
    """

    batch: int
    group: int
    member: int
    what: Activity
    engine: int | None
    since_s: float

    @property
    def reason(self) -> str:
        """What is waited for, without who waits."""
        return f"group {self.group}: member {self.member} {self._doing()} since {self.since_s:.1f} s"

    def __str__(self) -> str:
        return f"batch {self.batch} waits for {self.reason}"

    def _doing(self) -> str:
        match self.what:
            case Activity.RUNNING:
                return f"running on engine {self.engine}"
            case Activity.QUEUED:
                return "waiting for an engine"
            case Activity.IN_ROLLOUT:
                return "in the rollout function"
            case _:
                assert_never(self.what)


def prevailing(tally: Mapping[Activity, int]) -> Activity:
    """What most do, given all counts; where as many do one thing as another, the one that comes first in the order."""
    most = max(tally.values())
    return next(activity for activity in _IN_ORDER if tally[activity] == most)


def blocker(batch: int, group: int, unfinished: Mapping[int, Member]) -> Blocker:
    """Tell what ``batch`` waits for in a group, given its unfinished members by index, at least one.

    Of the members that do what most of them do, it is the one that has done so longest.
    """
    activities = [member.what for member in unfinished.values()]
    what = prevailing({activity: activities.count(activity) for activity in _IN_ORDER})
    return longest_at(what, batch, group, unfinished)


def longest_at(what: Activity, batch: int, group: int, unfinished: Mapping[int, Member]) -> Blocker:
    """Like :func:`blocker`, for the members that are doing one thing; at least one is."""
    doing_it = ((member.since_s, index, member) for index, member in unfinished.items() if member.what is what)
    since_s, index, member = min(doing_it)
    return Blocker(batch, group, index, what, member.engine, since_s)
