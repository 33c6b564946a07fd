"""Members of groups from their first token to their end: played, finished, failed, hurried or given up.

Data flow. A group that was admitted comes in; one *player* task for each of its members runs the user's rollout and
tells the ledger how it ended. What comes out is a complete group in the store and in the ledger, or an end that is
counted. It knows neither where tasks come from nor what is trained.

Invariant: the ledger and the store hear of every change in the same instant, with nothing awaited in between.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, assert_never

from staleflow import clock
from staleflow._core import StalenessLedger
from staleflow.blockers import Activity, Blocker, Member, blocker
from staleflow.config import Config, StragglerAction, StragglerPolicy
from staleflow.continuation import Continuation
from staleflow.errors import LedgerError
from staleflow.events import (
    Aborted,
    ClosedShort,
    Completed,
    Expired,
    Failed,
    Filtered,
    Finished,
    Truncated,
)
from staleflow.failures import FailureLimit
from staleflow.fleet import Fleet
from staleflow.recorder import Recorder
from staleflow.rollout import LLM, Deadline, Rollout, play
from staleflow.store import Group, Player, TrajectoryStore
from staleflow.transcript import Transcript
from staleflow.types import Interruption, TaskData, Trajectory

TIMER_RESOLUTION_S = 1e-3
"""A timer of the event loop may go off so much early."""

GroupFilter = Callable[[Sequence[Trajectory]], str | None]
"""Why a complete group should not be trained on, or None."""

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
"""Start a named task in the scope of the run."""


def uniform_rewards(group: Sequence[Trajectory]) -> str | None:
    """A :data:`GroupFilter`: takes out groups whose members all earned the same, which have advantage 0."""
    return "uniform_rewards" if len({trajectory.reward for trajectory in group}) == 1 else None


class Members(Generic[TaskData]):
    """Everything that is being played.

    ``changed`` is set when there may be something to decide, ``batch_may_be_ready`` when there may be something to
    train.
    """

    def __init__(
        self,
        *,
        rollout: Rollout[TaskData],
        group_filter: GroupFilter | None,
        config: Config,
        ledger: StalenessLedger,
        store: TrajectoryStore[TaskData],
        fleet: Fleet,
        recorder: Recorder,
        changed: asyncio.Event,
        spawn: Spawn,
    ) -> None:
        self.changed = changed
        self.batch_may_be_ready = asyncio.Event()
        self.failures = FailureLimit(config.max_failure_share)
        self.truncated = 0
        self._hurried: Counter[int] = Counter()
        self._rollout = rollout
        self._group_filter = group_filter
        self._config = config
        self._ledger = ledger
        self._store = store
        self._fleet = fleet
        self._continuation = Continuation(fleet, store, recorder)
        self._recorder = recorder
        self._spawn = spawn

    # -- playing -------------------------------------------------------------------------------------------------

    def start(self, group: Group[TaskData]) -> None:
        """Play all members of a group that was just admitted."""
        self._store.open(group)
        for member in range(len(group.finished)):
            if member > 0:
                self._start_attempt(group, member)
            self._play(group, member)

    def resume(self, group: Group[TaskData], playing: Sequence[Trajectory]) -> None:
        """Play on in a group that was live in another process, where these members had come so far."""
        self._store.open(group)
        for said in playing:
            group.attempts[said.member] += 1
            self._start_attempt(group, said.member)
            self._play(group, said.member, said)

    async def play_task(
        self,
        data: TaskData,
        trajectory: Trajectory,
        min_version: int,
        transcript: Transcript | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        """Play one task to its reward on engines of at least ``min_version``, or on those held at exactly that if it is
        ``pinned``; raises what :func:`play` raises."""
        deadline = Deadline(self._config.rollout_timeout_s, self._fleet.outage)
        generate = partial(self._continuation.generate, min_version=min_version, pinned=pinned, deadline=deadline)
        llm = LLM(trajectory, generate, self._fleet.tokenizer, self._fleet.max_model_tokens, transcript)
        await play(self._rollout, data, llm, trajectory, deadline)

    def _start_attempt(self, group: Group[TaskData], member: int) -> None:
        refusal = self._ledger.start_member(group.id, member, group.version)
        if refusal is not None:
            raise LedgerError(f"member {member} of group {group.id} refused at the group's own version: {refusal}")

    def _play(self, group: Group[TaskData], member: int, said: Trajectory | None = None) -> None:
        trajectory = Trajectory(group.task.id, group.id, member, group.attempts[member], group.admitted_s)
        transcript = None
        if said is not None and said.sampled_tokens > 0:
            transcript = Transcript(said, partial(self._recorder.reused, trajectory))
        task = self._spawn(self._play_member(group, trajectory, transcript), f"group {group.id} member {member}")
        group.players[member] = Player(trajectory, task, clock.now(), transcript)

    async def _play_member(self, group: Group[TaskData], trajectory: Trajectory, transcript: Transcript | None) -> None:
        try:
            await self.play_task(group.task.data, trajectory, group.version, transcript)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises fails its trajectory alone
            self._member_failed(group, trajectory, error)
        else:
            self._member_finished(group, trajectory)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _member_finished(self, group: Group[TaskData], trajectory: Trajectory) -> None:
        self.failures.succeeded()
        versions = trajectory.versions
        oldest, newest = min(versions), max(versions)
        self._store.finish(trajectory)
        complete = self._ledger.finish_member(
            group.id, trajectory.member, min_version=oldest, attempt=trajectory.attempt
        )
        self._recorder.event(
            Finished(
                self._recorder.t(),
                group.id,
                trajectory.member,
                trajectory.attempt,
                trajectory.reward or 0.0,
                len(versions),
                (oldest, newest),
            )
        )
        if complete:
            self._group_complete(group)
        self.changed.set()
        self.batch_may_be_ready.set()

    def _group_complete(self, group: Group[TaskData]) -> None:
        self._store.complete(group)
        self._recorder.event(Completed(self._recorder.t(), group.id))
        reason = None if self._group_filter is None else self._group_filter(group.trajectories())
        if reason is not None:
            self._ledger.filter(group.id, reason)
            self._store.close(group.id)
            self._recorder.event(Filtered(self._recorder.t(), group.id, reason))

    def _member_failed(self, group: Group[TaskData], trajectory: Trajectory, error: Exception) -> None:
        member, cause = trajectory.member, type(error).__name__
        self._recorder.event(Failed(self._recorder.t(), group.id, member, trajectory.attempt, cause))
        self.failures.failed(error, f"task {trajectory.task}, group {group.id}, member {member}")
        group.failures[member] += 1
        if group.failures[member] < self._config.max_attempts:
            group.attempts[member] += 1
            self._start_attempt(group, member)
            self._play(group, member)
        else:
            self._store.lose(trajectory)
            if group.lost > self._config.extra_members:
                self.abort(group, "failed")
        self.changed.set()
        self.batch_may_be_ready.set()

    def abort(self, group: Group[TaskData], reason: str) -> None:
        """Give up a group; its place is free at once."""
        group.cancel()
        self._ledger.abort(group.id, reason)
        self._store.close(group.id)
        self._recorder.event(Aborted(self._recorder.t(), group.id, reason))

    def expire(self, groups: Sequence[int]) -> None:
        """Give up groups whose last possible batch was filled without them."""
        for expired in groups:
            self._store.close(expired).cancel()
            self._recorder.event(Expired(self._recorder.t(), expired))

    # -- stragglers ----------------------------------------------------------------------------------------------

    def blockers(self) -> tuple[Blocker, ...]:
        """The groups that the next batch waits for, and what they are doing."""
        batch = self._ledger.next_batch
        blocking = [self._store.group(group) for group in self._ledger.blockers()]
        return tuple(blocker(batch, group.id, self._unfinished(group)) for group in blocking)

    def _unfinished(self, group: Group[TaskData]) -> dict[int, Member]:
        return {member: self._doing(player) for member, player in group.players.items()}

    def _doing(self, player: Player) -> Member:
        request_id = player.trajectory.newest_request_id
        if (running := self._fleet.running(request_id)) is not None:
            engine, routed_s = running
            return Member(Activity.RUNNING, self._recorder.t(routed_s), engine)
        if (queued_s := self._store.waiting_since_s(request_id)) is not None:
            return Member(Activity.QUEUED, self._recorder.t(queued_s))
        return Member(Activity.IN_ROLLOUT, self._recorder.t(player.since_s))

    def hurry(self, policy: StragglerPolicy, *, task_at_hand: bool) -> None:
        """Use the straggler policy on the groups that the next batch waits for, if they are few and old enough."""
        batch, blockers = self._ledger.next_batch, self._ledger.blockers()
        # While groups are missing that are not even admitted, hurrying the others helps nobody.
        missing = self._ledger.statistics().complete + len(blockers) < self._config.batch_size
        if missing or len(blockers) > policy.max_blockers:
            return
        # No more uses for one batch than it may have blockers: groups that are all slow would be replaced for ever.
        left = policy.max_blockers - self._hurried[batch]
        admitted_by_s = clock.now() - policy.patience_s + TIMER_RESOLUTION_S
        aged = [group for group in map(self._store.group, blockers) if group.admitted_s <= admitted_by_s]
        for group in aged[:left]:
            if self._hurry(group, policy.action, task_at_hand=task_at_hand):
                self._hurried[batch] += 1
                # One task is at hand at a time.
                task_at_hand = False
        self.changed.set()

    def _hurry(self, group: Group[TaskData], action: StragglerAction, *, task_at_hand: bool) -> bool:
        """Whether anything could be done about the group."""
        match action:
            case "replace":
                # Without a task for another group, the batch would be worse off.
                if task_at_hand:
                    self.abort(group, "straggler")
                return task_at_hand
            case "truncate":
                return self._truncate(group)
            case "close_short":
                return self._close_short(group)
            case _:
                assert_never(action)

    def _truncate(self, group: Group[TaskData]) -> bool:
        before = self.truncated
        for member, player in group.players.items():
            request_id = player.trajectory.newest_request_id
            if self._fleet.running(request_id) is not None and not player.trajectory.truncated:
                player.trajectory.truncated = True
                self.truncated += 1
                self._recorder.event(Truncated(self._recorder.t(), group.id, member))
                interrupting = self._fleet.interrupt(request_id, Interruption.TRUNCATE)
                self._spawn(interrupting, f"truncate {request_id}")
        return self.truncated > before

    def _close_short(self, group: Group[TaskData]) -> bool:
        members = tuple(trajectory.member for trajectory in group.trajectories())
        # One member alone has nothing to be compared with, unless groups are of one.
        if len(members) < min(2, self._config.group_size):
            return False
        self._ledger.close_short(group.id)
        self._recorder.event(ClosedShort(self._recorder.t(), group.id, members))
        self._group_complete(group)
        return True
