"""What the tests share: a pipeline on scripted parts, and an independent reading of its event log."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

import msgspec
from tiny_child import Reply

from staleflow import LLM, Config, ListTasks, Pipeline, Report, TaskSource
from staleflow.coordinator import Coordinator
from staleflow.events import (
    Aborted,
    Admitted,
    ClosedShort,
    Completed,
    Consumed,
    EngineDied,
    EngineRestarted,
    Event,
    Expired,
    Filtered,
    Finished,
    Interrupted,
    Published,
    Released,
    Routed,
)
from staleflow.members import GroupFilter
from staleflow.parameter_server.base import ParameterServer
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
from staleflow.process import Child
from staleflow.rollout import Rollout
from staleflow.testing import ScriptedEngine, ScriptedTrainer, run_virtually

Kind = TypeVar("Kind")
Result = TypeVar("Result")

LONG_S = 2000.0
"""Virtual seconds after which a run counts as hung; every run here needs far less."""


async def one_turn(task: int, llm: LLM) -> float:
    """The rollout of most tests: one question, one answer, a reward that varies."""
    completion = await llm.generate([task % 10], max_new_tokens=8)
    return float(sum(completion.token_ids) % 4)


class Parts(TypedDict, total=False):
    """The parts of a run that a test may choose; the rest is scripted."""

    tasks: TaskSource[int]
    rollout: Rollout[int]
    engines: Sequence[ScriptedEngine]
    trainer: ScriptedTrainer
    held_out: Sequence[int]
    group_filter: GroupFilter | None
    coordinator: Coordinator
    parameter_server: ParameterServer
    run_dir: Path
    resume: Path


class ScriptedRun:
    """A pipeline on scripted parts, and what it left behind in ``folder``."""

    def __init__(self, config: Config, folder: Path, **parts: Unpack[Parts]) -> None:
        self.config = config
        resume = parts.get("resume")
        self.weights = folder / "weights"
        self.weights.mkdir(parents=True)
        self.engines = parts.get("engines", [ScriptedEngine()])
        self.trainer = parts.get("trainer", ScriptedTrainer())
        self.pipeline = Pipeline(
            tasks=parts.get("tasks", ListTasks(range(1000), seed=None)),
            rollout=parts.get("rollout", one_turn),
            engines=self.engines,
            trainer=self.trainer,
            config=config,
            held_out=parts.get("held_out", ()),
            group_filter=parts.get("group_filter"),
            coordinator=parts.get("coordinator"),
            parameter_server=parts.get("parameter_server") or SharedMemoryParameterServer(self.weights),
            run_dir=None if resume is not None else parts.get("run_dir", folder / "run"),
            resume=resume,
            progress=False,
        )
        self.run_dir = self.pipeline.run_dir

    def run(self) -> Report:
        """Run to the end on a virtual clock, and check the log against the laws if the run ends well."""
        report = virtually(self.pipeline.run())
        self.replay().check(report)
        return report

    def fail(self, expected: type[Kind]) -> Kind:
        """Run to the error that is expected; checks what must hold however a run ends."""
        try:
            virtually(self.pipeline.run())
        except BaseException as error:
            if not isinstance(error, expected):
                raise
            self.check_wound_down()
            return error
        raise AssertionError(f"the run ended without a {expected.__name__}")

    def check_wound_down(self) -> None:
        """All parts are stopped, published weights are gone, no group is unaccounted for."""
        assert all(engine.stopped for engine in self.engines)
        assert self.trainer.stopped
        assert list(self.weights.iterdir()) == []
        replay = self.replay()
        replay.check_ended()
        ledger = self.pipeline._ledger.statistics()
        assert (ledger.admitted, ledger.trained) == (len(replay.state), len(replay.trained))
        assert (ledger.next_batch, ledger.published) == (replay.next_batch, replay.published)
        assert ledger.aborted == replay.count("aborted")

    def events(self) -> list[Event]:
        """The event log."""
        return read_events(self.run_dir)

    def events_of(self, kind: type[Kind]) -> list[Kind]:
        """The events of one kind."""
        return [event for event in self.events() if isinstance(event, kind)]

    def replay(self) -> "Replay":
        """Read the log with a model of its own; fails at the first event that breaks a law."""
        replay = Replay(self.config)
        for event in self.events():
            replay.apply(event)
        return replay


class Scripted(Protocol):
    """The ``scripted`` fixture: makes runs, each in a folder of its own."""

    def __call__(self, config: Config, **parts: Unpack[Parts]) -> ScriptedRun: ...


class Spawn(Protocol):
    """The ``spawn`` fixture: starts ``tiny_child`` processes."""

    async def __call__(self, behaviour: str) -> Child[Reply]: ...


def virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Run on a virtual clock, and end a run that hangs. Its own lag meter keeps the clock from noticing that."""

    async def bounded() -> Result:
        async with asyncio.timeout(LONG_S):
            return await main

    return run_virtually(bounded())


def read_events(run_dir: Path) -> list[Event]:
    lines = (run_dir / "events.jsonl").read_bytes().splitlines()
    decoder = msgspec.json.Decoder[Event](Event)
    return [decoder.decode(line) for line in lines]


@dataclass
class Replay:
    """The protocol in its plainest form: groups by state, checked after every event.

    It shares no code with the ledger. Deadlines follow the version a group was admitted at, raised at completion to
    the oldest token of its members. ``live`` are the groups that are running or complete.
    """

    config: Config
    next_batch: int = 0
    published: int = 0
    state: dict[int, str] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    version: dict[int, int] = field(default_factory=dict)
    task: dict[int, int] = field(default_factory=dict)
    finished: dict[int, dict[int, Finished]] = field(default_factory=dict)
    short: set[int] = field(default_factory=set)
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    deaths: int = 0
    restarts: int = 0
    interrupted: Counter[str] = field(default_factory=Counter)

    def apply(self, event: Event) -> None:
        match event:
            case Admitted(group=group, task=task, version=version):
                assert group not in self.state
                assert self.next_batch - self.config.max_staleness <= version <= self.published
                self.state[group], self.version[group], self.task[group] = "running", version, task
                self.finished[group] = {}
                self.live.add(group)
            case Finished(group=group, member=member, versions=(oldest, newest)):
                assert self.state[group] == "running"
                assert member not in self.finished[group]
                assert self.version[group] <= oldest <= newest <= self.published
                self.finished[group][member] = event
            case Completed(group=group):
                self._move(group, "complete", only_from={"running"})
                members = self.finished[group].keys()
                assert members <= set(range(self.config.group_size + self.config.extra_members))
                assert len(members) == self.config.group_size or group in self.short
                self.version[group] = min(member.versions[0] for member in self.finished[group].values())
            case ClosedShort(group=group, members=finished):
                assert self.state[group] == "running"
                assert set(finished) == self.finished[group].keys()
                self.short.add(group)
            case Expired(group=group):
                self._move(group, "expired", only_from={"running", "complete"})
                assert self.version[group] + self.config.max_staleness < self.next_batch
            case Filtered(group=group, reason=reason):
                self._move(group, f"filtered: {reason}", only_from={"complete"})
            case Aborted(group=group, reason=reason):
                self._move(group, f"aborted: {reason}", only_from={"running", "complete"})
            case Consumed(batch=batch, groups=groups):
                self._consume(batch, groups)
            case Released(batch=batch):
                assert batch == self.next_batch - 1 == self.published
                self.next_batch = batch
                for group in self.batches.pop(batch):
                    self._move(group, "released", only_from={"leased"})
            case Published(version=version):
                assert version == self.published + 1 == self.next_batch
                self.published = version
                for group in self.batches[version - 1]:
                    self._move(group, "trained", only_from={"leased"})
                    self.trained.append(group)
            case EngineDied():
                self.deaths += 1
                return
            case EngineRestarted():
                self.restarts += 1
                return
            case Interrupted(why=why):
                self.interrupted[why.value] += 1
                return
            case _:
                # Most events, by far: nothing has changed that the law speaks of.
                return
        self._check_capacity()

    def _consume(self, batch: int, groups: tuple[int, ...]) -> None:
        assert batch == self.next_batch == self.published
        assert len(groups) == len(set(groups)) == self.config.batch_size
        for group in groups:
            self._move(group, "leased", only_from={"complete", "released"})
            for member in self.finished[group].values():
                assert batch - member.versions[0] <= self.config.max_staleness
        self.batches[batch] = groups
        self.next_batch = batch + 1

    def _move(self, group: int, state: str, *, only_from: set[str]) -> None:
        assert self.state[group] in only_from, f"group {group} went from {self.state[group]} to {state}"
        self.state[group] = state
        if state != "complete":
            self.live.discard(group)

    def _check_capacity(self) -> None:
        if self.config.extra_groups > 0:
            # Only admission looks at the law then.
            return
        deadlines = [self.version[group] + self.config.max_staleness for group in self.live]
        for batch in range(self.next_batch, self.next_batch + self.config.max_staleness + 1):
            due = sum(deadline <= batch for deadline in deadlines)
            assert due <= (batch - self.next_batch + 1) * self.config.batch_size

    def count(self, kind: str) -> dict[str, int]:
        """Ended groups of a kind, by reason."""
        return dict(Counter(state.partition(": ")[2] for state in self.state.values() if state.startswith(kind)))

    @property
    def gaps(self) -> list[int]:
        """Per trained member: the batch it was trained in less its oldest version."""
        return [
            batch - member.versions[0]
            for batch, groups in self.batches.items()
            for group in groups
            for member in self.finished[group].values()
        ]

    def check(self, report: Report) -> None:
        """The report says what the log says."""
        accounting = report.accounting
        assert accounting.holds
        assert accounting.admitted == len(self.state)
        assert accounting.trained == len(self.trained) == report.steps * self.config.batch_size
        assert len(self.trained) == len(set(self.trained))
        assert accounting.filtered == self.count("filtered")
        assert accounting.aborted == self.count("aborted")
        assert accounting.expired == list(self.state.values()).count("expired")
        assert accounting.closed_short == len(self.short)
        assert accounting.running == accounting.complete == accounting.leased == 0
        assert accounting.late_completions == 0
        assert report.trained_trajectories == sum(len(self.finished[group]) for group in self.trained)
        assert (report.fleet.deaths, report.fleet.restarts) == (self.deaths, self.restarts)
        assert report.fleet.interrupted == self.interrupted
        assert report.staleness_max == max(self.gaps, default=0) <= self.config.max_staleness
        self.check_ended()

    def check_ended(self) -> None:
        """Nothing is left running."""
        alive = {group: state for group, state in self.state.items() if state in ("running", "complete", "leased")}
        assert alive == {}


def between(events: Sequence[Event], start: Event, end: Event) -> list[Event]:
    """The events strictly between two others."""
    return list(events[events.index(start) + 1 : events.index(end)])


def routed_group(event: Routed) -> int:
    """The group a routed request belongs to; 0 for held-out tasks."""
    return int(event.request.split(".")[0])
