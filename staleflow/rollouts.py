"""The rollout half of the picture: from tasks to complete groups in the ledger.

Data flow. ``feed`` keeps the next task at hand. ``coordinate`` wakes when something has changed, takes a snapshot,
lets the coordinator decide and carries out its commands: admit a group (if the ledger agrees), route a request, sync
an engine. One *player* task per member runs the user's rollout and tells the ledger how it ended. It knows nothing of
training: the other half finds complete groups in the store when the ledger is ready.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, assert_never

from staleflow import clock
from staleflow._core import Refusal, StalenessLedger
from staleflow.config import Config, StragglerPolicy
from staleflow.coordinator import Admit, Command, Coordinator, Route, Snapshot, Sync
from staleflow.errors import LedgerError
from staleflow.events import (
    Aborted,
    Admitted,
    Answered,
    ClosedShort,
    Completed,
    Dropped,
    Expired,
    Failed,
    Filtered,
    Finished,
    Requested,
    Routed,
    SourceEnded,
    Stalled,
    SyncBegan,
    Synced,
    TaskFetched,
    Truncated,
)
from staleflow.failures import FailureLimit
from staleflow.fleet import Fleet
from staleflow.parameter_server.base import ParameterServer
from staleflow.recorder import Recorder
from staleflow.rollout import LLM, Rollout, play
from staleflow.store import Group, Player, TrajectoryStore
from staleflow.tasks import TaskSource
from staleflow.types import FinishReason, GenerateRequest, Segment, Task, TaskData, Trajectory

STALL_WARNING_S = 120.0

logger = logging.getLogger("staleflow")

GroupFilter = Callable[[Sequence[Trajectory]], str | None]
"""Why a complete group should not be trained on, or None."""

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
"""Start a named task in the scope of the run."""


def uniform_rewards(group: Sequence[Trajectory]) -> str | None:
    """A :data:`GroupFilter`: takes out groups whose members all earned the same, which have advantage 0."""
    return "uniform_rewards" if len({trajectory.reward for trajectory in group}) == 1 else None


class Rollouts(Generic[TaskData]):
    """Everything that is being played.

    ``changed`` is set when there may be something to decide, ``batch_may_be_ready`` when there may be something to
    train. No group is admitted before ``admitting`` is set.
    """

    def __init__(
        self,
        *,
        tasks: TaskSource[TaskData],
        rollout: Rollout[TaskData],
        group_filter: GroupFilter | None,
        coordinator: Coordinator,
        config: Config,
        ledger: StalenessLedger,
        store: TrajectoryStore[TaskData],
        fleet: Fleet,
        weights: ParameterServer,
        recorder: Recorder,
        changed: asyncio.Event,
        spawn: Spawn,
    ) -> None:
        self.changed = changed
        self.batch_may_be_ready = asyncio.Event()
        self.admitting = False
        self.failures = FailureLimit(config.max_failure_share)
        self._tasks = tasks
        self._rollout = rollout
        self._group_filter = group_filter
        self._coordinator = coordinator
        self._config = config
        self._ledger = ledger
        self._store = store
        self._fleet = fleet
        self._weights = weights
        self._recorder = recorder
        self._spawn = spawn
        self._next_task: Task[TaskData] | None = None
        self._next_task_taken = asyncio.Event()
        self._exhausted = False
        self._members = config.group_size + config.extra_members
        self.truncated = 0

    @property
    def over(self) -> bool:
        """Whether no group will become complete any more."""
        return self._exhausted and self._store.running_members == 0

    def end(self, reason: str) -> None:
        """Admit nothing more and give up every group that no batch has taken."""
        self.admitting = False
        self._ledger.drain()
        for group in self._store.groups:
            self._abort(group, reason)

    async def watch_progress(self) -> None:
        """Say what everything waits for when no step has come for a while; the run itself goes on."""
        while True:
            published = self._ledger.published
            await asyncio.sleep(STALL_WARNING_S)
            if self._ledger.published == published and self.admitting:
                self._recorder.event(Stalled(self._recorder.t()))
                self._recorder.flush()
                ledger = self._ledger.statistics()
                source = "has no more" if self._exhausted else "is awaited"
                logger.warning(
                    "no step for %.0f s: batch %d waits for groups %s; %d requests run and %d wait for an engine; %s; "
                    "groups filtered so far: %s; attempts failed so far: %d",
                    STALL_WARNING_S,
                    ledger.next_batch,
                    self._ledger.blockers() or "not yet admitted",
                    self._fleet.load.running,
                    len(self._store.waiting),
                    f"the task source {source}" if self._next_task is None else "a task is at hand",
                    dict(ledger.filtered) or "none",
                    self.failures.total,
                )

    async def coordinate(self) -> None:
        """Decide and act whenever something has changed."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            for command in self._coordinator.decide(self._snapshot()):
                self._carry_out(command)

    async def feed(self) -> None:
        """Keep the next task at hand, so that a slow source holds up nothing that already runs."""
        while (task := await self._tasks.next()) is not None:
            self._next_task = task
            self._recorder.event(TaskFetched(self._recorder.t(), task.id))
            self._next_task_taken.clear()
            self.changed.set()
            await self._next_task_taken.wait()
        self._exhausted = True
        self._recorder.event(SourceEnded(self._recorder.t()))
        self.batch_may_be_ready.set()

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            engines=self._fleet.views(),
            waiting=self._store.waiting,
            running_members=self._store.running_members,
            group_size=self._members,
            wanted_groups=self._wanted_groups(),
            published=self._ledger.published,
        )

    def _wanted_groups(self) -> int:
        if not self.admitting or self._next_task is None:
            return 0
        needed = (self._config.steps - self._ledger.next_batch) * (self._config.batch_size + self._config.extra_groups)
        return max(0, needed - len(self._store))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Route(request_id, engine):
                if self._fleet.dispatch(request_id, engine):
                    self._recorder.event(Routed(self._recorder.t(), request_id, engine))
            case Admit(engine):
                self._admit(self._fleet.version(engine))
            case Sync(engine, version):
                self._fleet.begin_sync(engine)
                self._recorder.event(SyncBegan(self._recorder.t(), engine, version))
                self._spawn(self._sync(engine, version), f"sync {engine}")
            case _:
                assert_never(command)

    def _admit(self, version: int) -> None:
        if self._next_task is None:
            return
        admitted = self._ledger.admit(version)
        if isinstance(admitted, Refusal):
            return
        group = Group(admitted, self._next_task, version, self._members, clock.now())
        self._next_task = None
        self._next_task_taken.set()
        self._store.open(group)
        for member in range(self._members):
            if member > 0:
                self._start_attempt(group, member)
            self._play(group, member)
        self._recorder.event(Admitted(self._recorder.t(), group.id, group.task.id, version))

    async def _sync(self, engine: int, version: int) -> None:
        await self._fleet.sync(engine, version, self._weights)
        self._recorder.event(Synced(self._recorder.t(), engine, version))

    def _start_attempt(self, group: Group[TaskData], member: int) -> None:
        refusal = self._ledger.start_member(group.id, member, group.version)
        if refusal is not None:
            raise LedgerError(f"member {member} of group {group.id} refused at the group's own version: {refusal}")

    def _play(self, group: Group[TaskData], member: int) -> None:
        trajectory = Trajectory(group.task.id, group.id, member, group.attempts[member], group.admitted_s)
        task = self._spawn(self._play_member(group, trajectory), f"group {group.id} member {member}")
        group.players[member] = Player(trajectory, task)

    async def _play_member(self, group: Group[TaskData], trajectory: Trajectory) -> None:
        try:
            await self.play_task(group.task.data, trajectory, group.version)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises fails its trajectory alone
            self._member_failed(group, trajectory, error)
        else:
            self._member_finished(group, trajectory)

    async def play_task(self, data: TaskData, trajectory: Trajectory, min_version: int) -> None:
        """Play one task to its reward on engines of at least ``min_version``; raises what :func:`play` raises."""
        generate = partial(self._continue, min_version=min_version)
        llm = LLM(trajectory, generate, self._fleet.tokenizer, self._fleet.max_model_tokens)
        await play(self._rollout, data, llm, trajectory, self._config.rollout_timeout_s)

    async def _continue(self, trajectory: Trajectory, max_new_tokens: int, *, min_version: int) -> FinishReason:
        """Let an engine continue a trajectory and append the segment; raises what :meth:`Fleet.generate` raises."""
        trajectory.requests += 1
        request_id = trajectory.newest_request_id
        self._recorder.event(Requested(self._recorder.t(), request_id))
        request = GenerateRequest(request_id, trajectory.token_ids, max_new_tokens)
        try:
            engine, answer = await self._fleet.generate(request, min_version=min_version)
        except BaseException:
            self._recorder.event(Dropped(self._recorder.t(), request_id))
            raise
        self._recorder.event(Answered(self._recorder.t(), request_id, len(answer.token_ids)))
        if trajectory.first_segment_s is None:
            trajectory.first_segment_s = clock.now()
        trajectory.segments.append(Segment(answer.token_ids, True, engine, answer.logprobs, answer.versions))
        return answer.finish_reason

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
        if trajectory.attempt + 1 < self._config.max_attempts:
            group.attempts[member] += 1
            self._start_attempt(group, member)
            self._play(group, member)
        else:
            self._store.lose(trajectory)
            if group.lost > self._config.extra_members:
                self._abort(group, "failed")
        self.changed.set()
        self.batch_may_be_ready.set()

    def expire(self, groups: Sequence[int]) -> None:
        """Give up groups whose last possible batch was filled without them."""
        for expired in groups:
            self._store.close(expired).cancel()
            self._recorder.event(Expired(self._recorder.t(), expired))

    def hurry(self, policy: StragglerPolicy) -> None:
        """Use the straggler policy on the groups that the next batch waits for, if they are few enough."""
        blockers = self._ledger.blockers()
        # While groups are missing that are not even admitted, hurrying the others helps nobody.
        missing = self._ledger.statistics().complete + len(blockers) < self._config.batch_size
        if missing or len(blockers) > policy.max_blockers:
            return
        for blocker in blockers:
            group = self._store.group(blocker)
            match policy.action:
                case "replace":
                    self._abort(group, "straggler")
                case "truncate":
                    self._truncate(group)
                case "close_short":
                    self._close_short(group)
                case _:
                    assert_never(policy.action)
        self.changed.set()

    def _truncate(self, group: Group[TaskData]) -> None:
        for member, player in group.players.items():
            request_id = player.trajectory.newest_request_id
            if self._fleet.engine_of(request_id) is not None and not player.trajectory.truncated:
                player.trajectory.truncated = True
                self.truncated += 1
                self._recorder.event(Truncated(self._recorder.t(), group.id, member))
                self._spawn(self._fleet.truncate(request_id), f"truncate {request_id}")

    def _close_short(self, group: Group[TaskData]) -> None:
        members = tuple(trajectory.member for trajectory in group.trajectories())
        if members:
            self._ledger.close_short(group.id)
            self._recorder.event(ClosedShort(self._recorder.t(), group.id, members))
            self._group_complete(group)

    def _abort(self, group: Group[TaskData], reason: str) -> None:
        group.cancel()
        self._ledger.abort(group.id, reason)
        self._store.close(group.id)
        self._recorder.event(Aborted(self._recorder.t(), group.id, reason))
