"""The trajectory store: every live group with its members, and every request that no engine has yet.

Invariant: a group is in the store exactly as long as it is running or complete in the ledger, and each of its members
is played by at most one task at a time. The store decides nothing and knows neither engines nor the trainer.
"""

import asyncio
from typing import Generic, NamedTuple

import msgspec

from staleflow import clock
from staleflow.coordinator import EngineView, WaitingRequest, may_answer
from staleflow.errors import EngineError
from staleflow.transcript import Transcript
from staleflow.types import Task, TaskData, Trajectory


class Player(msgspec.Struct):
    """An attempt of a member that is being played; ``since_s`` is when it began or was last answered.

    ``transcript`` is what an earlier attempt had come to, if a process was lost with it.
    """

    trajectory: Trajectory
    task: "asyncio.Task[None]"
    since_s: float
    transcript: Transcript | None = None


class Group(Generic[TaskData]):
    """A live group: its task, its version, and what each of its ``members`` members has come to."""

    def __init__(self, group: int, task: Task[TaskData], version: int, members: int, admitted_s: float) -> None:
        self.id = group
        self.admitted_s = admitted_s
        self.task = task
        self.version = version
        self.finished: list[Trajectory | None] = [None] * members
        self.attempts = [0] * members
        self.failures = [0] * members
        self.players: dict[int, Player] = {}
        self.lost = 0
        self.complete = False

    @property
    def running_members(self) -> int:
        """Members that may still finish."""
        return 0 if self.complete else self.finished.count(None) - self.lost

    def trajectories(self) -> list[Trajectory]:
        """The members that have finished, in order."""
        return [trajectory for trajectory in self.finished if trajectory is not None]

    def cancel(self) -> None:
        """Cancel every member that is being played, dispatched or not."""
        for player in self.players.values():
            player.task.cancel()


class _Waiting(NamedTuple):
    min_version: int
    chosen: "asyncio.Future[int]"
    since_s: float
    pinned: bool


class TrajectoryStore(Generic[TaskData]):
    """Live groups by id, and waiting requests in order of arrival."""

    def __init__(self) -> None:
        self.running_members = 0
        """Members of live groups that have not finished."""
        self._groups: dict[int, Group[TaskData]] = {}
        self._waiting: dict[str, _Waiting] = {}

    def group(self, group: int) -> Group[TaskData]:
        """A live group by its id."""
        return self._groups[group]

    @property
    def groups(self) -> tuple[Group[TaskData], ...]:
        """All live groups, oldest first."""
        return tuple(self._groups.values())

    @property
    def finished_members(self) -> int:
        """Members of live groups that have finished."""
        return sum(len(group.finished) - group.finished.count(None) for group in self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def open(self, group: Group[TaskData]) -> None:
        """Take in a group that the ledger has admitted."""
        self._groups[group.id] = group
        self.running_members += group.running_members

    def answered(self, trajectory: Trajectory) -> None:
        """Note that an engine has answered a trajectory, which may be one of an evaluation."""
        group = self._groups.get(trajectory.group)
        player = None if group is None else group.players.get(trajectory.member)
        if player is not None:
            player.since_s = clock.now()

    def finish(self, trajectory: Trajectory) -> None:
        """Keep what a member has come to."""
        group = self._groups[trajectory.group]
        group.finished[trajectory.member] = trajectory
        del group.players[trajectory.member]
        self.running_members -= 1

    def lose(self, trajectory: Trajectory) -> None:
        """Give a member up that has failed for good."""
        group = self._groups[trajectory.group]
        del group.players[trajectory.member]
        group.lost += 1
        self.running_members -= 1

    def complete(self, group: Group[TaskData]) -> None:
        """Cancel the members that a group does not need any more; it keeps those that have finished."""
        self.running_members -= group.running_members
        group.complete = True
        group.cancel()
        group.players.clear()

    def close(self, group: int) -> Group[TaskData]:
        """Let go of a group that has ended or that a batch has taken."""
        closed = self._groups.pop(group)
        self.running_members -= closed.running_members
        return closed

    @property
    def waiting(self) -> tuple[WaitingRequest, ...]:
        """The requests that no engine has, oldest first; one that was cancelled is none of them, forgotten or not."""
        return tuple(
            WaitingRequest(request, waiting.min_version, waiting.pinned)
            for request, waiting in self._waiting.items()
            if not waiting.chosen.done()
        )

    def waiting_since_s(self, request_id: str) -> float | None:
        """When a request began to wait for an engine; None if it does not."""
        waiting = self._waiting.get(request_id)
        return None if waiting is None else waiting.since_s

    def wait_for_engine(self, request_id: str, min_version: int, *, pinned: bool = False) -> "asyncio.Future[int]":
        """Queue a request; the future becomes the engine it is routed to. Cancelling it leaves the queue."""
        chosen: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = _Waiting(min_version, chosen, clock.now(), pinned)
        return chosen

    def forget(self, request_id: str) -> None:
        """Take a request out of the queue if it is still there."""
        self._waiting.pop(request_id, None)

    def route(self, request_id: str, engine: EngineView) -> bool:
        """Give a waiting request its engine; False if it waits no longer, or for one of another version."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.chosen.done():
            return False
        if not may_answer(engine, WaitingRequest(request_id, waiting.min_version, waiting.pinned)):
            return False
        del self._waiting[request_id]
        waiting.chosen.set_result(engine.engine)
        return True

    def refuse(self, request_id: str, error: EngineError) -> None:
        """Let a request wait no longer: whoever made it gets the error."""
        waiting = self._waiting.pop(request_id)
        waiting.chosen.set_exception(error)
