"""``staleflow explain``: why the trainer or the engines of a run waited.

::

    run folder --reading--> Recording --timeline--> stretches in which nothing changed --causes--> explanation

Every module but ``command`` is a pure function of what the run left behind: events, ledger journal and settings.

Invariant: at every instant of a wait there is exactly one :class:`~staleflow.explain.causes.Cause`, so the seconds per
cause add up to the wait. ``docs/design/explain.md`` has the rules.
"""

from staleflow.explain.causes import Cause
from staleflow.explain.explanation import EngineMoment, Explanation, Moment, TrainerWait, Waiting, explain, moment
from staleflow.explain.reading import Recording, read_run

__all__ = [
    "Cause",
    "EngineMoment",
    "Explanation",
    "Moment",
    "Recording",
    "TrainerWait",
    "Waiting",
    "explain",
    "moment",
    "read_run",
]
