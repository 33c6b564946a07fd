"""The staleness ledger once more, in Python: what the law costs without the extension, and a second opinion on it.

It has the methods of :class:`staleflow.StalenessLedger` and gives the same answers, refusals and kinds of error; a test
drives both with the same calls. It is as fast as plain Python lets it be: admission at the newest version looks at one
deadline only, bulk calls check the law once, and what a built-in dict or heap can do is left to it. It leaves out what
is not the law: over-provisioning, snapshots, and the refusal of arguments that no type checker would let through.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import NamedTuple

from staleflow._core import RefusalReason
from staleflow.errors import ConfigError, NotReadyError, UnknownGroupError, VersionOrderError, WrongStateError

NOT_STARTED = -1
"""Stands for the attempt of a member that has none yet."""


class TwinRefusal(NamedTuple):
    """As :class:`staleflow.Refusal`."""

    reason: RefusalReason
    detail: str

    def __bool__(self) -> bool:
        return False


class TwinLease(NamedTuple):
    """As :class:`staleflow.Lease`."""

    batch: int
    groups: tuple[int, ...]


class TwinStatistics(NamedTuple):
    """The terms of :class:`staleflow.LedgerStatistics` that are not about over-provisioning."""

    admitted: int
    trained: int
    filtered: dict[str, int]
    aborted: dict[str, int]
    running: int
    complete: int
    leased: int
    next_batch: int
    published: int
    late_completions: int


class _Group:
    """A live group. ``finished`` is a set of members, as bits; ``oldest`` the smallest version they reported."""

    __slots__ = ("attempts", "finished", "leased", "oldest", "silent", "version")

    def __init__(self, version: int, size: int) -> None:
        self.version = version
        self.attempts = [0] if size == 1 else [0] + [NOT_STARTED] * (size - 1)
        self.finished = 0
        self.oldest: int | None = None
        self.silent = False
        self.leased = False

    def report(self, min_version: int | None) -> None:
        if min_version is None:
            self.silent = True
        elif self.oldest is None or min_version < self.oldest:
            self.oldest = min_version


class _Due:
    """The groups of one deadline: those running, in order of admission, and a heap of those complete."""

    __slots__ = ("complete", "running")

    def __init__(self) -> None:
        self.running: dict[int, None] = {}
        self.complete: list[int] = []

    def __len__(self) -> int:
        return len(self.running) + len(self.complete)


class TwinLedger:
    """As :class:`staleflow.StalenessLedger`."""

    def __init__(self, *, batch_size: int, max_staleness: int, group_size: int = 1) -> None:
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.group_size = group_size
        self.published = 0
        self._everyone = (1 << group_size) - 1
        self._next_id = 1
        self._groups: dict[int, _Group] = {}
        self._due: dict[int, _Due] = {}
        """By deadline, in order of deadlines."""
        self._unleased = 0
        """How many groups are in ``_due``."""
        self._lease: tuple[int, ...] = ()
        self._held = False
        self._closed: RefusalReason | None = None
        self._filtered: dict[str, int] = {}
        self._aborted: dict[str, int] = {}
        self._late_completions = 0

    @property
    def next_batch(self) -> int:
        """The batch that `consume` hands out next."""
        return self.published + self._held

    # Admission

    def admit(self, engine_version: int) -> int | TwinRefusal:
        """Admit one group, or say why not."""
        return self._insert(engine_version) if self.capacity(engine_version) else self._refusal(engine_version)

    def admit_many(self, engine_version: int, n: int) -> list[int]:
        """Admit up to ``n`` groups."""
        granted = min(n, self.capacity(engine_version))
        return [self._insert(engine_version) for _ in range(granted)]

    def capacity(self, engine_version: int) -> int:
        """How many more could be admitted at this version: the fewest places free up to any deadline from its own."""
        oldest = self.published + self._held - self.max_staleness
        if self._closed is not None or not oldest <= engine_version <= self.published:
            return 0
        deadline = engine_version + self.max_staleness
        due = self._unleased
        free = None
        for later in reversed(self._due):
            if later <= deadline:
                break
            left = self._places(later) - due
            free = left if free is None or left < free else free
            due -= len(self._due[later])
        left = self._places(deadline) - due
        return left if free is None or left < free else free

    def drain(self) -> None:
        """Refuse every admission from now on."""
        self._closed = self._closed or RefusalReason.DRAINING

    def close(self) -> None:
        """Refuse every admission from now on, for good."""
        self._closed = RefusalReason.CLOSED

    def _insert(self, version: int) -> int:
        group, self._next_id = self._next_id, self._next_id + 1
        self._groups[group] = _Group(version, self.group_size)
        self._due_at(version + self.max_staleness).running[group] = None
        self._unleased += 1
        return group

    def _refusal(self, version: int) -> TwinRefusal:
        if self._closed is not None:
            what = "draining" if self._closed is RefusalReason.DRAINING else "closed"
            return TwinRefusal(self._closed, f"the ledger is {what} and admits no new group")
        wrong_engine = self._engine_refusal(version, max(0, self.next_batch - self.max_staleness))
        if wrong_engine is not None:
            return wrong_engine
        batch = self._first_full(version + self.max_staleness)
        detail = f"every place up to batch {batch} is taken by a live group due by then"
        return TwinRefusal(RefusalReason.WINDOW_FULL, detail)

    def _engine_refusal(self, version: int, oldest: int) -> TwinRefusal | None:
        if version > self.published:
            detail = f"engine version {version} is newer than {self.published}, the newest published"
            return TwinRefusal(RefusalReason.FROM_FUTURE, detail)
        if version < oldest:
            detail = f"engine version {version} is older than {oldest}, the oldest usable here"
            return TwinRefusal(RefusalReason.TOO_OLD, detail)
        return None

    # From admission to completion

    def group_version(self, group: int) -> int:
        """The version that no token of this live group is older than."""
        return self._live(group).version

    def start_member(self, group: int, member: int, engine_version: int) -> TwinRefusal | None:
        """Begin a member's first attempt or its next one, or say why not."""
        found = self._running(group)
        if not 0 <= member < self.group_size or found.finished >> member & 1:
            raise WrongStateError(f"member {member} of group {group} has finished or does not exist")
        if not found.version <= engine_version <= self.published:
            return self._engine_refusal(engine_version, found.version)
        found.attempts[member] += 1
        return None

    def finish_member(self, group: int, member: int, *, min_version: int | None = None, attempt: int = 0) -> bool:
        """Finish a member's current attempt; True if that completes the group."""
        if not 0 < group < self._next_id:
            raise UnknownGroupError(f"no live group has id {group}")
        if not 0 <= member < self.group_size:
            raise WrongStateError(f"no group has a member {member}")
        found = self._groups.get(group)
        if found is None:
            self._late_completions += 1
            return False
        current = found.attempts[member]
        if current == NOT_STARTED:
            raise WrongStateError(f"member {member} of group {group} was never started")
        if current != attempt:
            self._late_completions += 1
            return False
        if found.finished >> member & 1:
            raise WrongStateError(f"member {member} of group {group} has already finished")
        self._check_tokens(found, min_version)
        found.report(min_version)
        found.finished |= 1 << member
        if found.finished != self._everyone:
            return False
        self._settle(group, found)
        return True

    def complete(self, group: int, *, min_version: int | None = None) -> None:
        """Finish every unfinished member."""
        found = self._running(group)
        self._check_tokens(found, min_version)
        self._finish_all(group, found, min_version)

    def complete_many(self, ids: Sequence[int]) -> None:
        """Complete all of these running groups or, if one of them cannot be, none."""
        groups = {group: self._running(group) for group in ids}
        if len(groups) < len(ids):
            raise WrongStateError("a group is named more than once")
        for group, found in groups.items():
            self._finish_all(group, found, None)

    def abort(self, group: int, reason: str) -> None:
        """End a running or complete group."""
        self._check_reason(reason)
        found = self._live(group)
        if found.leased:
            raise WrongStateError(f"group {group} is leased")
        self._end(group, found)
        self._aborted[reason] = self._aborted.get(reason, 0) + 1

    def filter(self, group: int, reason: str) -> None:
        """End a complete group that has nothing to teach."""
        self._check_reason(reason)
        found = self._live(group)
        if found.leased or found.finished != self._everyone:
            raise WrongStateError(f"group {group} is not complete")
        self._end(group, found)
        self._filtered[reason] = self._filtered.get(reason, 0) + 1

    def _finish_all(self, group: int, found: _Group, min_version: int | None) -> None:
        if self.group_size > 1:
            found.attempts = [max(attempt, 0) for attempt in found.attempts]
        found.report(min_version)
        found.finished = self._everyone
        self._settle(group, found)

    def _settle(self, group: int, found: _Group) -> None:
        """File a group as complete. Its version rises only if all members reported: a silent one may be older."""
        del self._due[found.version + self.max_staleness].running[group]
        if found.oldest is not None and not found.silent:
            found.version = found.oldest
        heappush(self._due_at(found.version + self.max_staleness).complete, group)

    def _end(self, group: int, found: _Group) -> None:
        due = self._due[found.version + self.max_staleness]
        if group in due.running:
            del due.running[group]
        else:
            due.complete.remove(group)
            heapify(due.complete)
        del self._groups[group]
        self._unleased -= 1

    # From completion to publication

    def is_ready(self) -> bool:
        """Whether `consume` would succeed."""
        return not self._held and (bool(self._lease) or self._shortfall() == 0)

    def blockers(self) -> list[int]:
        """The fewest running groups whose completion makes the next batch ready."""
        if self._lease and not self._held:
            return []
        return list(islice(chain.from_iterable(due.running for due in self._due.values()), self._shortfall()))

    def consume(self) -> TwinLease:
        """Hand out the next batch: those due first, in order of admission."""
        if not self.is_ready():
            raise NotReadyError(f"batch {self.next_batch} is not ready")
        if not self._lease:
            self._lease = tuple(self._take_batch())
            for group in self._lease:
                self._groups[group].leased = True
        lease = TwinLease(self.published, self._lease)
        self._held = True
        return lease

    def publish(self, version: int) -> None:
        """Make the held lease final."""
        if version != self.published + 1:
            raise VersionOrderError(f"version {version} does not follow {self.published}")
        if not self._held:
            raise WrongStateError("no batch is out for training")
        for group in self._lease:
            del self._groups[group]
        self._lease, self._held = (), False
        self.published = version

    def release(self, batch: int) -> None:
        """Take the held batch back."""
        if not self._held or batch != self.published:
            raise WrongStateError(f"batch {batch} is not out for training")
        self._held = False

    def statistics(self) -> TwinStatistics:
        """Account for every admitted group."""
        complete = sum(len(due.complete) for due in self._due.values())
        return TwinStatistics(
            admitted=self._next_id - 1,
            trained=self.published * self.batch_size,
            filtered=dict(sorted(self._filtered.items())),
            aborted=dict(sorted(self._aborted.items())),
            running=self._unleased - complete,
            complete=complete,
            leased=len(self._lease),
            next_batch=self.next_batch,
            published=self.published,
            late_completions=self._late_completions,
        )

    def _take_batch(self) -> list[int]:
        taken: list[int] = []
        for due in self._due.values():
            wanted = self.batch_size - len(taken)
            if wanted >= len(due.complete):
                taken += sorted(due.complete)
                due.complete = []
            else:
                taken += [heappop(due.complete) for _ in range(wanted)]
        self._due = {deadline: due for deadline, due in self._due.items() if due}
        self._unleased -= len(taken)
        return taken

    # The law, in terms of places in the batches that no lease fills

    def _places(self, batch: int) -> int:
        """Places up to this batch."""
        first = self.published + 1 if self._lease else self.published
        return (batch - first + 1) * self.batch_size

    def _first_full(self, deadline: int) -> int:
        """The first batch, from this deadline on, up to which every place is taken."""
        due = sum(len(groups) for other, groups in self._due.items() if other <= deadline)
        if due >= self._places(deadline):
            return deadline
        for later, groups in self._due.items():
            if later > deadline:
                due += len(groups)
                if due >= self._places(later):
                    return later
        raise AssertionError("only asked when the window is full")

    def _shortfall(self) -> int:
        """How many running groups must still finish before the next batch can be filled."""
        complete = running = late = 0
        for deadline, due in self._due.items():
            complete += len(due.complete)
            running += len(due.running)
            late = max(late, running - self._places(deadline - 1))
        return max(late, self.batch_size - complete)

    def _due_at(self, deadline: int) -> _Due:
        due = self._due.get(deadline)
        if due is None:
            due = _Due()
            self._due = dict(sorted((self._due | {deadline: due}).items()))
        return due

    # What makes a call illegal

    def _live(self, group: int) -> _Group:
        found = self._groups.get(group)
        if found is None:
            raise UnknownGroupError(f"no live group has id {group}")
        return found

    def _running(self, group: int) -> _Group:
        found = self._groups.get(group)
        if found is None:
            raise UnknownGroupError(f"no live group has id {group}")
        if found.finished == self._everyone:
            raise WrongStateError(f"group {group} is complete or leased")
        return found

    def _check_tokens(self, found: _Group, min_version: int | None) -> None:
        if min_version is not None and not found.version <= min_version <= self.published:
            raise VersionOrderError(f"no token can be of version {min_version}")

    @staticmethod
    def _check_reason(reason: str) -> None:
        if not reason:
            raise ConfigError("reason = '' is not allowed: a text that is not empty")
