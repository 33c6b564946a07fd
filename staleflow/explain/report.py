"""What a person sees of an explanation."""

from collections.abc import Iterator
from typing import assert_never

from rich.console import Console
from rich.table import Table

from staleflow.explain.causes import phrase
from staleflow.explain.explanation import EngineMoment, Explanation, Moment, TrainerWait, Waiting
from staleflow.explain.timeline import NoTraining, TrainsBatch, WaitsForBatch

LONGEST_WAITS = 5
BLOCKERS = 10
"""That many are printed."""


def print_explanation(found: Explanation, console: Console) -> None:
    """Print a whole run: seconds and share per cause, and the longest waits."""
    console.print(
        f"Known until {found.until_s:.2f} s, in phase {found.phase!r}: {found.published} of {found.steps} steps, "
        f"{found.training_s:.2f} s of training."
    )
    if found.training_s == 0:
        console.print("Waiting counts while the run trains; so far it has not.")
        return
    console.print(_table(found))
    longest = sorted(found.waits, key=lambda wait: wait.waited_s, reverse=True)[:LONGEST_WAITS]
    if longest:
        console.print(f"The longest of {len(found.waits)} waits of the trainer:")
    for wait in longest:
        console.print(f"  {_sentence(wait)}")


def print_moment(found: Moment, console: Console) -> None:
    """Print one moment: what everybody is doing or waiting for."""
    console.print(f"At {found.t:.2f} s, in phase {found.phase!r}:")
    for line in _trainer_lines(found):
        console.print(f"  {line}")
    for index, engine in enumerate(found.engines):
        console.print(f"  engine {index} {_engine_line(engine)}")


def _table(found: Explanation) -> Table:
    table = Table("", "waits because", show_edge=False)
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    _add(table, "trainer", found.trainer, found.training_s)
    for index, engine in enumerate(found.engines):
        _add(table, f"engine {index}", engine, found.training_s)
    return table


def _add(table: Table, who: str, waiting: Waiting, training_s: float) -> None:
    for number, (cause, seconds) in enumerate(waiting.seconds.items()):
        table.add_row(who if number == 0 else "", phrase(cause), f"{seconds:.2f}", f"{seconds / training_s:.1%}")
    who = "" if waiting.seconds else who
    table.add_row(who, "all", f"{waiting.waited_s:.2f}", f"{waiting.waited_s / training_s:.1%}", end_section=True)


def _sentence(wait: TrainerWait) -> str:
    if len(wait.seconds) == 1:
        return str(wait)
    parts = ", ".join(f"{seconds:.2f} s {phrase(cause)}" for cause, seconds in wait.seconds.items())
    return f"{wait} ({parts})"


def _trainer_lines(found: Moment) -> Iterator[str]:
    match found.trainer:
        case NoTraining():
            yield "the trainer is not asked to train"
        case TrainsBatch(batch, since_s):
            yield f"the trainer trains batch {batch} since {since_s:.2f} s"
        case WaitsForBatch(batch, since_s):
            why = "" if found.cause is None else f": {phrase(found.cause)}"
            yield f"the trainer waits for batch {batch} since {since_s:.2f} s{why}"
            for blocker in found.blockers[:BLOCKERS]:
                yield f"  {blocker}"
            if len(found.blockers) > BLOCKERS:
                yield f"  and for {_counted(len(found.blockers) - BLOCKERS, 'more running group')}"
            if found.missing_groups:
                yield f"  batch {batch} waits for {_counted(found.missing_groups, 'more group')} to be admitted"
        case _:
            assert_never(found.trainer)


def _engine_line(engine: EngineMoment) -> str:
    pulls = "" if engine.pulls is None else f", and pulls version {engine.pulls}"
    doing = f"runs {_counted(engine.running, 'request')}"
    if engine.cause is not None:
        doing = f"has nothing to run since {engine.idle_since_s:.2f} s: {phrase(engine.cause)}"
    return f"(version {engine.version}{pulls}) {doing}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
