"""The staleness ledger, the trajectory queue and the watch over the event loop, implemented in Rust.

Versions, batches, ids and counts are plain integers. An integer that no version, batch or id can equal, such
as a negative or an astronomical one, raises the same error as any other wrong one, never ``OverflowError``. A
call that raises leaves the ledger or the queue as it was.
"""

import enum
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from os import PathLike
from types import GenericAlias
from typing import Any, Generic, Literal, TypeVar, final

from typing_extensions import disjoint_base

__all__ = [
    "DeadlineQueue",
    "EngineReply",
    "Lease",
    "LedgerReplay",
    "LedgerStatistics",
    "LoopWatch",
    "QueueStatistics",
    "Refusal",
    "RefusalReason",
    "StalenessLedger",
    "StallAlarm",
    "decode_reply",
    "first_malformed_token",
]

_Item = TypeVar("_Item")

class RefusalReason(enum.Enum):
    """Why a legal request cannot be granted now."""

    TOO_OLD = "too_old"
    """The engine's weights are older than this work may be started with."""
    FROM_FUTURE = "from_future"
    """The engine claims weights that are not published."""
    WINDOW_FULL = "window_full"
    """One more group would leave some live group without a place in a batch."""
    DRAINING = "draining"
    """The ledger admits no new group, so that the live ones can run out."""
    CLOSED = "closed"
    """The ledger is done."""

@final
class Refusal:
    """A legal request that cannot be granted now. Frozen; nothing was reserved and nothing changed.

    Always falsy. Group ids start at 1, so ``if group := ledger.admit(version):`` tells them apart.
    """

    @property
    def reason(self) -> RefusalReason:
        """The kind of refusal."""
    @property
    def detail(self) -> str:
        """The versions or the batch that decided it, for people."""
    def __bool__(self) -> Literal[False]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Lease:
    """A batch handed to the trainer. Frozen."""

    @property
    def batch(self) -> int:
        """The batch's index. Its step trains on the weights of this version and publishes the next."""
    @property
    def groups(self) -> tuple[int, ...]:
        """Ids of its ``batch_size`` groups in training order: earliest deadline first, then as admitted."""
    @property
    def expired(self) -> tuple[int, ...]:
        """Ids of the groups that had to be in this batch and were not needed for it, in admission order.

        They have ended; their running members should be cancelled. Always empty without ``extra_groups``, and for
        a batch that was released before.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class LedgerStatistics:
    """Where all admitted groups are, at one instant. Frozen.

    Accounting law: ``admitted == trained + sum(filtered.values()) + sum(aborted.values()) + expired + running
    + complete + leased``.
    """

    @property
    def admitted(self) -> int:
        """Groups ever admitted."""
    @property
    def trained(self) -> int:
        """Groups in a batch whose step is published."""
    @property
    def filtered(self) -> dict[str, int]:
        """Groups ended for want of a learning signal, by reason, sorted by reason. A fresh dict each time."""
    @property
    def aborted(self) -> dict[str, int]:
        """Groups ended by failure or cancellation, by reason, sorted by reason. A fresh dict each time."""
    @property
    def expired(self) -> int:
        """Groups ended by missing their deadline. Without ``extra_groups`` there is no way to miss one."""
    @property
    def running(self) -> int:
        """Live groups with an unfinished member."""
    @property
    def complete(self) -> int:
        """Finished groups that wait to be consumed."""
    @property
    def leased(self) -> int:
        """Groups in a batch that the trainer holds, or that was released and not consumed again yet."""
    @property
    def next_batch(self) -> int:
        """The next batch to be consumed."""
    @property
    def published(self) -> int:
        """The newest published version."""
    @property
    def late_completions(self) -> int:
        """Member completions, not groups, that were ignored because their attempt or group was over."""
    @property
    def closed_short(self) -> int:
        """Groups that `close_short` made complete. Each is also counted in the term of where it is."""
    @property
    def accounting_holds(self) -> bool:
        """Whether the accounting law is true of these numbers."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class StalenessLedger:
    """Decides which group may begin and which batch may be trained, inside a hard staleness bound.

    For every token of every consumed group, the index of the consuming batch minus the version that sampled
    the token is at most ``max_staleness``. Time spent waiting in a queue counts. In return for that,
    admission may refuse; a group that is admitted is never thrown away for being too old (unless there are
    ``extra_groups``).

    Not thread-safe: all calls belong to one thread or one event loop.
    """

    def __new__(
        cls,
        *,
        batch_size: int,
        max_staleness: int,
        group_size: int = 1,
        extra_groups: int = 0,
        extra_members: int = 0,
    ) -> StalenessLedger:
        """Make an empty ledger at version 0 whose next batch is 0.

        Args:
            batch_size: groups per train step, 1 to 16777216.
            max_staleness: the bound in published versions, 0 to 1000000. 0 is synchronous training.
            group_size: trajectories per group, 1 to 65536.
            extra_groups: groups admitted beyond ``batch_size`` for every batch, 0 to 16777216. A batch is then
                ready with any ``batch_size`` complete groups, and those left behind at their deadline expire.
            extra_members: members played beyond ``group_size`` in every group, 0 to 65536. The first
                ``group_size`` to finish make the group complete; completions of the others are late.

        Raises:
            ConfigError: a value is out of range, or all of them together allow more than 268435456 trajectories to
                be live; names the argument, the value and what is allowed.
        """
    @property
    def batch_size(self) -> int:
        """Groups per train step."""
    @property
    def max_staleness(self) -> int:
        """The staleness bound in published versions."""
    @property
    def group_size(self) -> int:
        """Trajectories per group."""
    @property
    def extra_groups(self) -> int:
        """Groups admitted beyond the batch size."""
    @property
    def extra_members(self) -> int:
        """Members played beyond the group size."""
    @property
    def next_batch(self) -> int:
        """The batch that `consume` hands out next: `published`, or one more while a lease is held."""
    @property
    def published(self) -> int:
        """The newest version that engines can pull."""
    def admit(self, engine_version: int) -> int | Refusal:
        """Admit one group; its member 0 starts, as attempt 0, on an engine that serves this version.

        Returns the group's id, or a `Refusal`. Ids start at 1 and increase.

        Raises:
            VersionOrderError: the number can be no version at all.
        """
    def admit_many(self, engine_version: int, n: int) -> list[int]:
        """Admit up to ``n`` groups on engines of this version, as many as `admit` would grant one by one.

        Returns their ids; an empty list if none is granted.

        Raises:
            ConfigError: ``n`` is negative.
            VersionOrderError: the number can be no version at all.
        """
    def capacity(self, engine_version: int) -> int:
        """Tell how many more groups could be admitted now on engines of this version.

        Raises:
            VersionOrderError: the number can be no version at all.
        """
    def drain(self) -> None:
        """Refuse every admission from now on, as DRAINING; live groups go on. Snapshots remember it."""
    def close(self) -> None:
        """Refuse every admission from now on, as CLOSED, even if draining. Snapshots remember it."""
    def group_version(self, group: int) -> int:
        """Tell the version that no token of this live group is older than.

        Raises:
            UnknownGroupError: no live group has this id.
        """
    def start_member(self, group: int, member: int, engine_version: int) -> Refusal | None:
        """Begin a member's attempt 0 on an engine of this version or, if it is running, its next attempt.

        Returns None if granted. Returns a `Refusal` if the version is older than the group's (TOO_OLD) or not
        published (FROM_FUTURE). Draining and closing refuse no member of a live group.

        Raises:
            UnknownGroupError: no live group has this id.
            WrongStateError: the group is not running, or the member has finished or does not exist.
            VersionOrderError: the number can be no version at all.
        """
    def finish_member(self, group: int, member: int, *, min_version: int | None = None, attempt: int = 0) -> bool:
        """Finish a member's current attempt.

        If ``group_size`` members have finished, the group becomes complete. If moreover each of them gave a
        ``min_version``, the group's version rises to the smallest of these.

        A completion of another attempt, or of a group that has ended, is ignored and counted as late.

        Args:
            group: the group's id.
            member: 0 to ``group_size + extra_members - 1``.
            min_version: version of the oldest token that the policy sampled in this member.
            attempt: the attempt that finished.

        Returns:
            True if the group became complete by this call.

        Raises:
            UnknownGroupError: the id was never handed out.
            WrongStateError: the member does not exist, was never started, or has finished this attempt.
            VersionOrderError: ``min_version`` is older than the group's version, or not published.
        """
    def complete(self, group: int, *, min_version: int | None = None) -> None:
        """Finish as many members as a running group still needs, the first ones, each with this ``min_version``.

        Raises:
            UnknownGroupError: no live group has this id.
            WrongStateError: the group is not running.
            VersionOrderError: ``min_version`` is older than the group's version, or not published.
        """
    def complete_many(self, ids: Sequence[int]) -> None:
        """Complete all of these running groups or, if one of them cannot be, none.

        Raises:
            UnknownGroupError: no live group has one of the ids.
            WrongStateError: one of the groups is not running, or is named twice.
        """
    def close_short(self, group: int) -> None:
        """Complete a running group with the members that have finished, fewer than ``group_size``.

        Completions of the others are late. Counted in `LedgerStatistics.closed_short`.

        Raises:
            UnknownGroupError: no live group has this id.
            WrongStateError: the group is not running, or no member has finished.
        """
    def abort(self, group: int, reason: str) -> None:
        """End a running or complete group that failed or was cancelled. Its place is free at once.

        Raises:
            UnknownGroupError: no live group has this id.
            WrongStateError: the group is leased.
            ConfigError: the reason is empty.
        """
    def filter(self, group: int, reason: str) -> None:
        """End a complete group that has nothing to teach. Its place is free at once.

        Raises:
            UnknownGroupError: no live group has this id.
            WrongStateError: the group is not complete.
            ConfigError: the reason is empty.
        """
    def is_ready(self) -> bool:
        """Tell whether `consume` would succeed. False while a lease is held."""
    def blockers(self) -> list[int]:
        """List the fewest running groups whose completion makes the next batch ready, those due first.

        If not even all running groups are enough, lists all of them: more must be admitted. While a lease is
        held, lists those of the batch after it. Empty after a release, since that batch is ready.
        """
    def consume(self) -> Lease:
        """Hand out the next batch. A released one is handed out again: same groups, same order.

        Raises:
            NotReadyError: `is_ready` is False; names the groups or the lease that it waits for.
        """
    def publish(self, version: int) -> None:
        """Make the held lease final: its groups are trained, and engines may now serve ``version``.

        Call it only when the weights can really be pulled.

        Raises:
            VersionOrderError: ``version`` is not ``published + 1``.
            WrongStateError: no lease is held.
        """
    def release(self, batch: int) -> None:
        """Take a batch back from a trainer that will not publish it, for instance because it died.

        Its groups keep their batch: they cannot be aborted or filtered, and no other group may count on the
        place.

        Raises:
            WrongStateError: the lease of this batch is not held.
        """
    def statistics(self) -> LedgerStatistics:
        """Account for every admitted group."""
    def snapshot(self) -> bytes:
        """Serialize all state, such that the restored ledger decides the same for ever after."""
    @staticmethod
    def restore(data: bytes) -> StalenessLedger:
        """Make a ledger from what `snapshot` returned.

        Raises:
            SnapshotError: the bytes are foreign, of another format version, damaged or contradictory.
        """
    def start_journal(self) -> None:
        """Keep a journal of every change of state from here on, a few bytes each.

        Whoever starts it calls `take_journal` now and then. A restored ledger keeps none. To start again is to begin
        another journal: what was not taken of the first is gone; to go on with one is `continue_journal`.
        """
    def continue_journal(self, noted_s: float) -> None:
        """Keep a journal from here on that is the end of another one; what is taken is to be appended to that.

        Args:
            noted_s: the last time noted in the other journal, which has come to the state of this ledger.
        """
    def note_time(self, now_s: float) -> None:
        """Note in the journal that the changes since the last call happened by this time.

        The ledger itself has no clock and does not use it. Does nothing if nothing changed, or without a journal.

        Args:
            now_s: seconds since a moment of the caller's choice; resolved to a microsecond.
        """
    @property
    def noted_s(self) -> float:
        """The newest time at which the journal has noted changes; 0 before the first, or without a journal."""
    def take_journal(self) -> bytes:
        """Take what the journal holds since the last call, to be appended to what was taken before.

        Empty if nothing changed, or without a journal.
        """
    @staticmethod
    def replay(journal: bytes) -> LedgerReplay:
        """Rebuild the ledger from its journal, change by change.

        What a killed process left unfinished at the very end is ignored.

        Raises:
            SnapshotError: the bytes are foreign, of another format version or damaged.
        """

@final
class LedgerReplay:
    """Iterates over a journal. Yields ``(t, ledger)`` for every noted time: the ledger as it was then.

    It is one ledger that changes from item to item, and that nobody else may change; take a
    `StalenessLedger.snapshot` to keep a moment. An item raises `SnapshotError` if the journal is damaged there.
    Changes after the last noted time count as of that time.
    """

    @property
    def ledger(self) -> StalenessLedger:
        """The ledger at the moment reached so far; at first, as it was when the journal was started."""
    def __iter__(self) -> LedgerReplay: ...
    def __next__(self) -> tuple[float, StalenessLedger]: ...

@final
class QueueStatistics:
    """What went through a queue, at one instant. Frozen.

    Accounting law: ``put == taken + held``.
    """

    @property
    def put(self) -> int:
        """Items ever accepted."""
    @property
    def taken(self) -> int:
        """Items that the consumer took."""
    @property
    def held(self) -> int:
        """Items in the queue."""
    @property
    def refused(self) -> int:
        """Items given back because the queue was full."""
    @property
    def wakes(self) -> int:
        """Times that a waiting consumer was woken."""
    @property
    def high_water(self) -> int:
        """The most items that were ever held at one time."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@disjoint_base
class DeadlineQueue(Generic[_Item]):
    """What `staleflow.TrajectoryQueue` does without an event loop. All of it may be called from any thread."""

    def __new__(cls, capacity: int) -> DeadlineQueue[_Item]:
        """Make an empty queue.

        Args:
            capacity: the most items that it holds, 1 to 4294967295.

        Raises:
            ConfigError: the capacity is out of range.
        """
    @classmethod
    def __class_getitem__(cls, key: Any) -> GenericAlias: ...
    @property
    def capacity(self) -> int:
        """The most items that it holds."""
    @property
    def closed(self) -> bool:
        """Whether it accepts no item any more."""
    def __len__(self) -> int:
        """Count the items held."""
    def try_put(self, item: _Item, deadline: int = 0) -> None:
        """Put an item, from any thread, and wake the consumer if it waits. Never blocks, never drops anything.

        Args:
            item: any object.
            deadline: the last batch that it may be part of; what is due first leaves first.

        Raises:
            QueueFull: ``capacity`` items are held. The error's ``item`` is the one that was not put.
            QueueClosed: the queue was closed. Likewise.
            ConfigError: the deadline can be no batch.
        """
    def close(self) -> None:
        """End the queue, from any thread: nothing can be put, and the consumer is told after the last item."""
    def statistics(self) -> QueueStatistics:
        """Count what went through."""
    def _take(self, max_items: int, event_loop: AbstractEventLoop, wake: Callable[[], object]) -> list[_Item] | None:
        """Take up to ``max_items``. If there are none, return None and have the loop call ``wake``, once, on news.

        Raises:
            QueueClosed: the queue was closed and the last item was taken.
            ConfigError: ``max_items`` is not positive.
        """
    def _stop_waiting(self) -> None:
        """Forget whom to wake."""

@final
class StallAlarm:
    """Says when to tell of a thing that stands still: at the limit, and whenever that has doubled since it told."""

    def __new__(cls, limit_s: float) -> StallAlarm:
        """Make an alarm that is quiet until something has stood still for ``limit_s``.

        Raises:
            ConfigError: it is negative or not finite.
        """
    def stands_still(self, lasted_s: float) -> bool:
        """Tell whether to tell of a thing that has stood still for ``lasted_s`` by now.

        Raises:
            ConfigError: it is negative or not finite.
        """
    def moves(self) -> bool:
        """Tell whether a stall that was told of is over, now that the thing has moved."""

@final
class LoopWatch:
    """A watch over one event loop, by a thread that needs neither the loop nor the interpreter lock.

    A stall is told of as `StallAlarm` says, in a file of its own and on stderr. The report is what ``account``
    returns, or, if the interpreter does not answer, what the loop made known last and the stacks of all threads.
    """

    def __new__(
        cls, limit_s: float, period_s: float, folder: str | PathLike[str], account: Callable[[], str]
    ) -> LoopWatch:
        """Begin to watch.

        Args:
            limit_s: the loop is blocked when it has given no sign of life for so long.
            period_s: how often to look for one.
            folder: where the reports go; made when there is one.
            account: called on a thread of its own.

        Raises:
            ConfigError: a time is negative or not finite.
            RuntimeError: every real-time signal of the process is in use; the stacks need one.
        """
    def beat(self, t: float, known: str) -> None:
        """Give a sign of life.

        Args:
            t: the time, for the name of the report.
            known: what is to be said, if the loop says nothing more, about what it waits for.
        """
    def stop(self) -> None:
        """End the watch. Idempotent."""

@final
class EngineReply:
    """What a vLLM server has sampled for one request. Frozen."""

    @property
    def request_id(self) -> str:
        """The server's own id of the request."""
    @property
    def finish_reason(self) -> str:
        """Why it ends, in the server's words."""
    @property
    def token_ids(self) -> list[int]:
        """The sampled tokens."""
    @property
    def logprobs(self) -> list[float]:
        """One for each sampled token."""
    @property
    def weight_versions(self) -> list[tuple[str, int, int]] | None:
        """Runs ``(version, start, end)`` of sampled tokens, ``end`` excluded; None if the server does not say."""
    @property
    def prompt_logprobs(self) -> list[float]:
        """One for each token of the prompt after the first; empty if they were not asked for, or never computed."""

def decode_reply(body: bytes, prompt: Sequence[int] | None = None) -> EngineReply:
    """Parse a reply of ``/inference/v1/generate`` or ``/v1/completions``, with the interpreter lock released.

    Args:
        body: JSON.
        prompt: the tokens of the prompt, if their logprobs were asked for.

    Raises:
        EngineReplyError: it is no such reply, or its parts do not fit together; says where.
    """

def first_malformed_token(
    logprobs: Sequence[float], versions: Sequence[int], oldest: int, published: int
) -> int | None:
    """Find the first token that no engine can have sampled.

    Its logprob is not that of a probability, or its version is not within ``oldest`` and ``published``, or it is
    older than the version before it. Both sequences are of one length. None if every token is well-formed.
    """
