"""A run folder, read back. Every failure to read is a :class:`RunFolderError` that names the file and the fix.

The run may still go on or may have been killed. Then the last line of the event log may be cut short, and the log may
be ahead of the ledger's journal: both ends are left out, since nothing is known of the ledger there.
"""

import itertools
from pathlib import Path

import msgspec

from staleflow._core import StalenessLedger
from staleflow.config import Config
from staleflow.errors import RunFolderError, SnapshotError
from staleflow.events import (
    Aborted,
    Admitted,
    ClosedShort,
    Consumed,
    EngineDied,
    Event,
    Filtered,
    Finished,
    Published,
    Released,
    Resumed,
    Routed,
    SyncBegan,
)

CHANGES_THE_LEDGER = (Admitted, Finished, ClosedShort, Filtered, Aborted, Consumed, Published, Released)
MICROSECONDS_PER_S = 1_000_000


class Recording(msgspec.Struct, frozen=True):
    """What a run has left behind.

    ``engines`` counts them at the start and, if the run was resumed, from each time on. ``journal`` is that of the
    ledger, empty if it has not changed; ``marks_us`` are the times noted in it.
    """

    config: Config
    engines: list[int]
    events: list[Event]
    journal: bytes
    marks_us: list[int]


class _Settings(msgspec.Struct, frozen=True):
    config: Config
    engines: list[msgspec.Raw]


def microseconds(t: float) -> int:
    """A time as the journal resolves it."""
    return int(t * MICROSECONDS_PER_S + 0.5)


def read_run(folder: Path) -> Recording:
    """Read what a run has left so far; raises :class:`RunFolderError`."""
    settings = _read_settings(folder / "config.json")
    # In this order: a journal that is read later covers all events even if the run goes on.
    events = _read_events(folder / "events.jsonl")
    journal = _read(folder / "ledger.journal")
    marks_us = _read_marks(folder / "ledger.journal", journal, settings.config)
    covered_us = marks_us[-1] if marks_us else -1
    for index in range(len(events) - 1, -1, -1):
        if microseconds(events[index].t) <= covered_us:
            break
        if isinstance(events[index], CHANGES_THE_LEDGER):
            del events[index:]
    return Recording(settings.config, _engines(events, len(settings.engines)), events, journal, marks_us)


def _engines(events: list[Event], settings: int) -> list[int]:
    resumed = [event.engines for event in events if isinstance(event, Resumed)]
    if not resumed:
        return [settings]
    # The settings are those of the last process; in the first one an engine that did nothing is not missed.
    first = itertools.takewhile(lambda event: not isinstance(event, Resumed), events)
    return [
        1 + max((event.engine for event in first if isinstance(event, SyncBegan | Routed | EngineDied)), default=0),
        *resumed,
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RunFolderError(
            f"{path} does not exist: give the folder of a run that has started, for instance runs/<date>; "
            "a copy of a run folder needs config.json, events.jsonl and ledger.journal"
        ) from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error


def _read_settings(path: Path) -> _Settings:
    try:
        return msgspec.json.decode(_read(path), type=_Settings)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path} is damaged: {error}; restore it from a copy") from error


def _read_events(path: Path) -> list[Event]:
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    *lines, _cut_short = _read(path).split(b"\n")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RunFolderError(
                f"{path}, line {number} is no event: {error}; delete what follows line {number - 1} to have the run "
                "explained until then"
            ) from error
    return events


def _read_marks(path: Path, journal: bytes, config: Config) -> list[int]:
    if not journal:
        return []
    try:
        replay = StalenessLedger.replay(journal)
        for name in ("batch_size", "max_staleness", "group_size", "extra_groups", "extra_members"):
            said, kept = getattr(config, name), getattr(replay.ledger, name)
            if said != kept:
                raise RunFolderError(
                    f"{path.with_name('config.json')} has {name} {said} and {path.name} {kept}: they are of two runs"
                )
        return [microseconds(t) for t, _ in replay]
    except SnapshotError as error:
        raise RunFolderError(f"{path} is damaged: {error}; restore it from a copy") from error
