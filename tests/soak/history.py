"""Whether the history that many processes have left in one run folder is that of a run that nobody has killed.

It is read with :class:`support.Replay`, which shares no code with the ledger.
"""

import traceback
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from support import Replay

from staleflow import Config, StalenessLedger
from staleflow.errors import SnapshotError
from staleflow.events import Admitted, Event


class Promise(msgspec.Struct, frozen=True):
    """One thing that must be so, what was found, and whether that keeps it."""

    what: str
    found: str
    kept: bool


class _Settings(msgspec.Struct, frozen=True):
    config: Config


class _Step(msgspec.Struct, frozen=True):
    step: int


class _Verdict(msgspec.Struct, frozen=True):
    accuracy_before: float
    accuracy_after: float
    staleness_max: int
    accounting: dict[str, Any]


def judge(run_dir: Path, *, steps: int, accuracy: float) -> list[Promise]:
    """Hold the history of a job that has ended against what is promised of it."""
    try:
        config = msgspec.json.decode((run_dir / "config.json").read_bytes(), type=_Settings).config
        verdict = msgspec.json.decode((run_dir / "verdict.json").read_bytes(), type=_Verdict)
        history = _History(config, run_dir)
        trained = [record.step for record in _lines(run_dir / "metrics.jsonl", _Step)]
    except (OSError, msgspec.MsgspecError) as error:
        return [Promise("the run folder can be read", str(error), kept=False)]
    return [
        Promise(
            f"accuracy, held out, at least {accuracy:.2f}",
            f"{verdict.accuracy_before:.3f} -> {verdict.accuracy_after:.3f}",
            verdict.accuracy_after >= accuracy,
        ),
        history.lawful(),
        _steps_once(trained, history.replay, steps),
        history.tasks_once(),
        history.groups_once(),
        history.bound_holds(verdict.staleness_max),
        history.accounted(verdict.accounting),
        _journal_agrees(run_dir / "ledger.journal", history.replay),
    ]


class _History:
    """The joined event log, replayed as far as it is lawful."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.replay = Replay(config)
        self._tasks: list[int] = []
        self._events = 0
        self._newest_t = 0.0
        self._broken: str | None = None
        for event in _lines(run_dir / "events.jsonl", Event):
            self._take(event)
            if self._broken is not None:
                return

    def _take(self, event: Event) -> None:
        self._events += 1
        if isinstance(event, Admitted):
            self._tasks.append(event.task)
        if event.t < self._newest_t:
            self._broken = f"line {self._events} goes back in time: {event}"
        self._newest_t = event.t
        try:
            self.replay.apply(event)
        except (AssertionError, KeyError) as error:
            law = traceback.extract_tb(error.__traceback__)[-1].line
            self._broken = f"line {self._events}, {event}, breaks: {law}"

    def lawful(self) -> Promise:
        """No event breaks the law of the ledger."""
        return Promise("the law holds after every event", self._broken or f"{self._events:,} events", not self._broken)

    def tasks_once(self) -> Promise:
        """The source goes on in order, so what is admitted is every task from the first on."""
        wrong = [task for place, task in enumerate(self._tasks) if task != place]
        found = f"task {wrong[0]} is out of its turn" if wrong else f"{len(self._tasks):,} tasks"
        return Promise("no task skipped, none in two groups", found, bool(self._tasks) and not wrong)

    def groups_once(self) -> Promise:
        """Exactly once."""
        trained = self.replay.trained
        twice = len(trained) - len(set(trained))
        found = f"{twice} twice" if twice else f"{len(trained):,} groups"
        return Promise("no group in two published steps", found, bool(trained) and not twice)

    def bound_holds(self, reported: int) -> Promise:
        """Of every member that was trained on, and of the figure that the run gives."""
        bound, gaps = self.replay.config.max_staleness, self.replay.gaps
        longest = max(gaps, default=0)
        kept = bool(gaps) and longest == reported <= bound
        return Promise(f"staleness at most {bound}", f"{longest}; the run says {reported}", kept)

    def accounted(self, said: dict[str, Any]) -> Promise:
        """Every admitted group has ended, and the run counts the same ones."""
        states = list(self.replay.state.values())
        counted = {
            "admitted": len(states),
            "trained": len(self.replay.trained),
            "filtered": self.replay.count("filtered"),
            "aborted": self.replay.count("aborted"),
            "expired": states.count("expired"),
            "running": 0,
            "complete": 0,
            "leased": 0,
        }
        differ = {name: (value, said.get(name)) for name, value in counted.items() if said.get(name) != value}
        ended = ("trained", "filtered", "aborted", "expired")
        open_ended = sum(not state.startswith(ended) for state in states)
        if differ:
            name, (value, other) = next(iter(differ.items()))
            found = f"{name} {value}; the run says {other}"
        else:
            found = f"{open_ended} groups have not ended" if open_ended else f"{len(states):,} groups"
        return Promise("the accounting law", found, not differ and not open_ended)


def _steps_once(trained: list[int], replay: Replay, steps: int) -> Promise:
    found = f"{replay.published} published, {len(trained)} in the metrics"
    wrong = [second for first, second in pairwise([-1, *trained]) if second != first + 1]
    if wrong:
        found += f", step {wrong[0]} out of its turn"
    kept = not wrong and list(replay.batches) == trained and replay.published == len(trained) == steps
    return Promise(f"steps 0 to {steps - 1}, each once", found, kept)


def _journal_agrees(path: Path, replay: Replay) -> Promise:
    what = "the ledger's journal says the same"
    try:
        moments = StalenessLedger.replay(path.read_bytes())
        lawful = all(ledger.statistics().accounting_holds for _, ledger in moments)
    except (OSError, SnapshotError) as error:
        return Promise(what, str(error), kept=False)
    told = moments.ledger.statistics()
    same = (told.admitted, told.trained, told.published) == (len(replay.state), len(replay.trained), replay.published)
    return Promise(what, f"{told.trained:,} groups trained in {told.published} steps", lawful and same)


def _lines(path: Path, kind: Any) -> Iterator[Any]:
    """One record a line; raises ``msgspec.MsgspecError`` at the first that is none."""
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as lines:
        for line in lines:
            yield decoder.decode(line)
