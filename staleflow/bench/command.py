"""``staleflow bench``: measure everything, print the tables, write ``bench.json``, ``bench.md`` and ``bench.png``."""

import argparse
import subprocess
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from staleflow.bench import ledgers, plot, queues, rust, tables, trajectories
from staleflow.bench.plan import FULL, QUICK, Plan
from staleflow.bench.result import FORMAT, Figure, Result, commit, this_machine, today, versions
from staleflow.errors import RunFolderError

WIDTH = 130
LINE = 60
"""Characters of what cargo says that are shown."""


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Offer ``bench``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure what the core costs on this machine",
        description="Measures what ledger, queue and pipeline cost on this machine, beside baselines in the same run. "
        "Takes about ten minutes, building included; nothing else should run meanwhile.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write bench.json, bench.md and bench.png (default: a new folder in runs/)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer sizes and samples, to see whether it works here; not for comparing machines",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for; returns the exit code."""
    out = arguments.out or Path("runs") / f"bench-{datetime.now():%Y-%m-%d-%H%M%S}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot create the folder {out}: {error.strerror}") from error
    why_no_rust = rust.why_not()
    notes = [note for note in (why_no_rust, None if plot.is_possible() else plot.MISSING) if note]
    progress = Console(stderr=True)
    for note in notes:
        progress.print(note, highlight=False, markup=False, soft_wrap=True)
    plan, benches = QUICK if arguments.quick else FULL, rust.benches() if why_no_rust is None else []
    write(measure(plan, benches=benches, notes=notes, console=progress), out, _wide_console())
    return 0


def measure(plan: Plan, *, benches: Sequence[str], notes: Sequence[str], console: Console) -> Result:
    """Measure everything in the plan, and these benchmarks of the core alone; shows progress on the console."""
    before = (this_machine(), versions(), commit(), today())
    figures: list[Figure] = []
    notes = list(notes)
    parts = {
        "ledger": (ledgers.measure(plan), len(plan.cells) * len(ledgers.LIVES)),
        "queues": (queues.measure(plan), len(queues.PRODUCERS) + 2),
        "pipeline": (trajectories.measure(plan), 1),
    }
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        for name, (measured, total) in parts.items():
            _say(console, f"measuring {name}")
            task = progress.add_task(name, total=total, now="")
            for some in measured:
                figures += some
                progress.advance(task)
        for bench in benches:
            _say(console, f"running cargo bench {bench}")
            task = progress.add_task(f"cargo bench {bench}", total=None, now="")
            try:
                figures += rust.measure(bench, plan.cells, partial(_show, progress, task))
            except subprocess.CalledProcessError as error:
                notes.append(f"`{' '.join(error.cmd[:6])}` failed:\n{error.output}")
            progress.update(task, total=1, completed=1, now="")
    machine, found, at, date = before
    return Result(
        format=FORMAT,
        date=date,
        machine=machine,
        versions=found,
        commit=at,
        quick=plan is not FULL,
        notes=notes,
        figures=figures,
    )


def write(result: Result, out: Path, console: Console) -> None:
    """Print the tables, and write them with all raw samples to this folder."""
    tables.print_tables(result, console)
    (out / "bench.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    (out / "bench.md").write_text(tables.markdown(result))
    if plot.is_possible():
        plot.write(result, out / "bench.png")
    console.print(f"Written to {out}", highlight=False, markup=False, soft_wrap=True)


def _wide_console() -> Console:
    """Standard output; where that is no terminal, wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _say(console: Console, what: str) -> None:
    """Where there is no terminal, the progress bars are drawn only at the end."""
    if not console.is_terminal:
        console.print(what, highlight=False)


def _show(progress: Progress, task: TaskID, line: str) -> None:
    progress.update(task, now=line[:LINE])
