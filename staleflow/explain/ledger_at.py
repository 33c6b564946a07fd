"""The ledger of a recorded run, as of a time that only moves forward."""

import msgspec

from staleflow._core import StalenessLedger
from staleflow.explain.reading import Recording


class LedgerFacts(msgspec.Struct, frozen=True):
    """What the ledger says at one moment.

    ``blockers`` are the groups that the next batch waits for. Even when they are all complete it still lacks
    ``missing_groups`` that are not admitted yet. ``live_groups`` are running or complete.
    """

    next_batch: int
    published: int
    ready: bool
    blockers: tuple[int, ...]
    missing_groups: int
    live_groups: int


class LedgerAt:
    """The replayed ledger; :meth:`advance` moves it forward."""

    def __init__(self, recording: Recording) -> None:
        config = recording.config
        self._marks_us = recording.marks_us
        self._marks_passed = 0
        self._facts: LedgerFacts | None = None
        if recording.journal:
            self._replay = iter(StalenessLedger.replay(recording.journal))
            self._ledger = self._replay.ledger
        else:
            self._ledger = StalenessLedger(
                batch_size=config.batch_size,
                max_staleness=config.max_staleness,
                group_size=config.group_size,
                extra_groups=config.extra_groups,
                extra_members=config.extra_members,
            )

    @property
    def members(self) -> int:
        """Members that are played in every group."""
        return self._ledger.group_size + self._ledger.extra_members

    @property
    def groups_per_batch(self) -> int:
        """Groups that are admitted for every batch."""
        return self._ledger.batch_size + self._ledger.extra_groups

    @property
    def facts(self) -> LedgerFacts:
        """What the ledger says now."""
        if self._facts is None:
            statistics = self._ledger.statistics()
            live_groups = statistics.running + statistics.complete
            self._facts = LedgerFacts(
                next_batch=statistics.next_batch,
                published=statistics.published,
                ready=self._ledger.is_ready(),
                blockers=tuple(self._ledger.blockers()),
                missing_groups=max(0, self._ledger.batch_size - live_groups),
                live_groups=live_groups,
            )
        return self._facts

    def grants(self, version: int) -> bool:
        """Whether a group would be admitted on engines of this version."""
        return self._ledger.capacity(version) > 0

    def advance(self, now_us: int) -> None:
        """Carry out every change up to this time."""
        while self._marks_passed < len(self._marks_us) and self._marks_us[self._marks_passed] <= now_us:
            next(self._replay)
            self._marks_passed += 1
            self._facts = None
