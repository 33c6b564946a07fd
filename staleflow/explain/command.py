"""``staleflow explain``: reads a run folder and prints why the trainer and the engines waited."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from staleflow.events import Event
from staleflow.explain.explanation import Explanation, Moment, explain, moment
from staleflow.explain.reading import read_run
from staleflow.explain.report import print_explanation, print_moment

PROGRESS_AFTER_S = 2.0
PROGRESS_EVENTS = 10_000


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Offer ``explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="tell why the trainer or the engines of a run waited",
        description="Tells why the trainer and the engines of a run waited, in seconds per cause. The run may have "
        "ended in any way or still go on; one that goes on is known up to its last step.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument(
        "--at",
        type=float,
        metavar="SECONDS",
        help="only what was going on at this moment, in seconds since the start of the run",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with all waits, not just the longest")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    recording = read_run(arguments.run_dir)
    if arguments.at is None:
        found: Explanation | Moment = explain(recording, _watched)
    else:
        found = moment(recording, arguments.at, _watched)
    if arguments.json:
        console.file.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    elif isinstance(found, Explanation):
        print_explanation(found, console)
    else:
        print_moment(found, console)
    return 0


def _watched(events: list[Event]) -> Iterator[Event]:
    """Show on a terminal how far it is, from the moment on that it seems long."""
    console = Console(stderr=True)
    show_from_s = time.monotonic() + PROGRESS_AFTER_S
    progress = Progress(console=console, transient=True, auto_refresh=False)
    task = progress.add_task("reading events", total=len(events))
    try:
        for index, event in enumerate(events):
            if index % PROGRESS_EVENTS == 0 and console.is_terminal and time.monotonic() >= show_from_s:
                progress.start()
                progress.update(task, completed=index, refresh=True)
            yield event
    finally:
        if progress.live.is_started:
            progress.stop()
