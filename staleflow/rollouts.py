"""The rollout half of the picture: from tasks to complete groups in the ledger.

Data flow. ``feed`` keeps the next task at hand. ``coordinate`` wakes when something has changed, takes a snapshot,
lets the coordinator decide and carries out its commands: admit a group (if the ledger agrees), route a request, sync
an engine. What becomes of an admitted group is the business of :mod:`staleflow.members`; training is that of
:mod:`staleflow.training`.
"""

import asyncio
from typing import Generic, assert_never

from staleflow import clock
from staleflow._core import Refusal, StalenessLedger
from staleflow.config import Config
from staleflow.coordinator import Admit, Command, Coordinator, Migrate, Route, Snapshot, Sync
from staleflow.events import Admitted, Routed, SourceEnded, SyncBegan, Synced, TaskFetched
from staleflow.fleet import Fleet
from staleflow.members import Members, Spawn
from staleflow.recorder import Recorder
from staleflow.store import Group, TrajectoryStore
from staleflow.tasks import TaskSource
from staleflow.types import SyncMode, Task, TaskData
from staleflow.weight_sync import BegunSync, WeightSync

LISTED = 4
"""How many groups a sentence spells out."""


class Rollouts(Generic[TaskData]):
    """From tasks to groups that are played. No group is admitted before ``admitting`` is set."""

    def __init__(
        self,
        *,
        tasks: TaskSource[TaskData],
        coordinator: Coordinator,
        config: Config,
        ledger: StalenessLedger,
        store: TrajectoryStore[TaskData],
        fleet: Fleet,
        weight_sync: WeightSync,
        recorder: Recorder,
        members: Members[TaskData],
        spawn: Spawn,
    ) -> None:
        self.admitting = False
        self.cursor = 0
        """The first task that no group has."""
        self._tasks = tasks
        self._coordinator = coordinator
        self._config = config
        self._members_each = config.group_size + config.extra_members
        self._ledger = ledger
        self._store = store
        self._fleet = fleet
        self._weight_sync = weight_sync
        self._recorder = recorder
        self._members = members
        self._spawn = spawn
        self._next_task: Task[TaskData] | None = None
        self._next_task_taken = asyncio.Event()
        self._exhausted = False

    @property
    def over(self) -> bool:
        """Whether no group will become complete any more."""
        return self._exhausted and self._store.running_members == 0

    @property
    def task_at_hand(self) -> bool:
        """Whether another group could be admitted at once, as far as tasks go."""
        return self._next_task is not None

    def end(self, reason: str) -> None:
        """Admit nothing more and give up every group that no batch has taken."""
        self.admitting = False
        self._ledger.drain()
        for group in self._store.groups:
            self._members.abort(group, reason)

    def progress(self) -> tuple[int, ...] | None:
        """Greater whenever a batch was published or taken, or a trajectory finished; None while nothing is admitted.

        What is thrown away counts only until then: a filter that takes out every group lets nothing complete.
        """
        if not self.admitting:
            return None
        return self._ledger.published, self._ledger.next_batch, self._store.finished_members

    def waits_for(self) -> str:
        """What everything waits for, as a sentence."""
        if not self.admitting:
            return "nothing is admitted: the run starts, evaluates or ends"
        ledger = self._ledger.statistics()
        source = "has no more" if self._exhausted else "is awaited"
        blockers = [blocker.reason for blocker in self._members.blockers()]
        more = f" and {len(blockers) - LISTED} more groups" if len(blockers) > LISTED else ""
        blocking = "; ".join(blockers[:LISTED]) + more or "groups not yet admitted"
        training = f"batch {ledger.published} is being trained; " if ledger.leased else ""
        return (
            f"{training}batch {ledger.next_batch} waits for {blocking}; {self._fleet.load.running} requests run and "
            f"{len(self._store.waiting)} wait for an engine; "
            f"{f'the task source {source}' if self._next_task is None else 'a task is at hand'}; "
            f"groups filtered so far: {dict(ledger.filtered) or 'none'}; "
            f"attempts failed so far: {self._members.failures.total}"
        )

    async def coordinate(self) -> None:
        """Decide and act whenever something has changed."""
        while True:
            await self._members.changed.wait()
            self._members.changed.clear()
            # What was migrated has its engine already.
            for arrival in self._fleet.arrivals():
                self._carry_out(Route(*arrival))
            for command in self._coordinator.decide(self._snapshot()):
                self._carry_out(command)

    async def feed(self) -> None:
        """Keep the next task at hand, so that a slow source holds up nothing that already runs."""
        while (task := await self._tasks.next()) is not None:
            self._next_task = task
            self._recorder.event(TaskFetched(self._recorder.t(), task.id))
            self._next_task_taken.clear()
            self._members.changed.set()
            await self._next_task_taken.wait()
        self._exhausted = True
        self._recorder.event(SourceEnded(self._recorder.t()))
        self._members.batch_may_be_ready.set()

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            engines=self._fleet.views(),
            waiting=self._store.waiting,
            running_members=self._store.running_members,
            group_size=self._members_each,
            wanted_groups=self._wanted_groups(),
            published=self._ledger.published,
            running=self._fleet.running_requests,
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
            case Sync(engine, version, mode):
                sync = self._begin_sync(engine, version, mode)
                if sync is not None:
                    self._spawn(self._sync(sync), f"sync {engine}")
            case Migrate(request_id, engine):
                self._spawn(self._fleet.migrate(request_id, engine), f"migrate {request_id}")
            case _:
                assert_never(command)

    def _admit(self, version: int) -> None:
        if self._next_task is None:
            return
        admitted = self._ledger.admit(version)
        if isinstance(admitted, Refusal):
            return
        group = Group(admitted, self._next_task, version, self._members_each, clock.now())
        self.cursor = group.task.id + 1
        self._next_task = None
        self._next_task_taken.set()
        self._members.start(group)
        self._recorder.event(Admitted(self._recorder.t(), group.id, group.task.id, version))

    async def sync_all(self, version: int) -> None:
        """Have every engine that is there pull a version, whatever the coordinator would do."""
        async with asyncio.TaskGroup() as syncing:
            for engine in range(len(self._fleet.engines)):
                sync = self._begin_sync(engine, version, "keep")
                if sync is not None:
                    syncing.create_task(self._sync(sync))

    def _begin_sync(self, engine: int, version: int, mode: SyncMode) -> BegunSync | None:
        begun = self._weight_sync.begin(engine, version, mode)
        if begun is not None:
            self._recorder.event(SyncBegan(self._recorder.t(), engine, version, mode))
        return begun

    async def _sync(self, sync: BegunSync) -> None:
        if await self._weight_sync.carry_out(sync):
            self._recorder.event(Synced(self._recorder.t(), sync.engine, sync.version))
