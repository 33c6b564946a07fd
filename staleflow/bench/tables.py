"""Figures as tables for people: what they mean stands above each, and ratios stand beside what they are ratios of."""

import statistics
from collections.abc import Callable, Iterable, Iterator

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from staleflow.bench.result import Figure, Result

NOTHING = "–"
LIVES = ("bulk", "single", "members")
LEDGERS = ("Rust", "Python", "twin")


class Sheet(msgspec.Struct, frozen=True):
    """One table; the first ``names`` columns say what a row is about, the others are numbers."""

    title: str
    note: str
    header: list[str]
    names: int
    rows: list[list[str]]


def sheets(result: Result) -> list[Sheet]:
    """All tables that there are figures for."""
    made = (lives(result), operations(result), memory(result), queues(result), wakes(result), trajectories(result))
    return [sheet for sheet in made if sheet.rows]


def lives(result: Result) -> Sheet:
    """A row for every configuration of the ledger."""
    figures = {
        (_cell(figure), figure.work, figure.contestant): _ns(figure.value)
        for figure in _select(result, "ledger")
        if figure.step == "life"
    }
    columns = [(life, contestant) for life in LIVES for contestant in LEDGERS]
    return Sheet(
        title="A group's whole life in the ledger, ns",
        note="Admitted, completed, its share of consume and publish, while `live` others run. bulk: `admit_many` and "
        "`complete_many`. single: a call each. members: 8 members, each started and finished by a call (16 calls and "
        "the share; an eighth of it is a trajectory's). Rust: the core alone. Python: `staleflow.StalenessLedger`. "
        "twin: the same law in plain Python.",
        header=["B", "eta", "live", *(f"{life} {contestant}" for life, contestant in columns)],
        names=0,
        rows=[
            [*(f"{size:,}" for size in cell), *(figures.get((cell, *column), NOTHING) for column in columns)]
            for cell in sorted({cell for cell, _, _ in figures})
        ],
    )


def operations(result: Result) -> Sheet:
    """A row for every operation of the ledger: how much it varies over all configurations, and the ratios."""
    figures = list(_select(result, "ledger"))
    operations = dict.fromkeys((figure.work, figure.step) for figure in figures)
    contestants = [*LEDGERS, "Rust counters"]
    rows = []
    for work, step in operations:
        of_step = [figure for figure in figures if (figure.work, figure.step) == (work, step)]
        values = {name: {_cell(f): f.value for f in of_step if f.contestant == name} for name in contestants}
        ranges = [_range(values[name].values()) for name in contestants]
        ratios = [_ratio(values["twin"], values[name]) for name in ("Python", "Rust")]
        rows.append([f"{work}: {step}", *ranges, *ratios])
    return Sheet(
        title="Ledger operations, ns per call (consume and publish: per group), median and range over the cells above",
        note="twin/Python and twin/Rust: medians over the cells. Rust counters: a limit, a count and a queue, no law.",
        header=["operation", *contestants, "twin/Python", "twin/Rust"],
        names=1,
        rows=rows,
    )


def memory(result: Result) -> Sheet:
    """A row for every size of groups."""
    figures = list(_select(result, "memory"))
    steps = dict.fromkeys(figure.step for figure in figures)
    return Sheet(
        title="Memory of the core, bytes per live group, median and range over full ledgers of every B and eta",
        note="What the ledger holds of the allocator, its fixed part included.",
        header=["group", "Rust"],
        names=1,
        rows=[[step, _range(figure.value for figure in figures if figure.step == step)] for step in steps],
    )


def queues(result: Result) -> Sheet:
    """A row for every way through a queue."""
    return _by_contestant(
        _select(result, "queue"),
        title="Queues, ns per item",
        note="put, take: one thread, nobody waits. transfer: from so many threads to one asyncio consumer (Rust: to a "
        "thread), from the first put to the last item taken. asyncio.Queue is fed by `call_soon_threadsafe`, "
        "queue.Queue emptied from `run_in_executor`: that is what makes each of them right here.",
        row=lambda figure: (
            f"{figure.work}, {figure.setting['producers']} to 1" if figure.step == "item" else figure.step
        ),
    )


def wakes(result: Result) -> Sheet:
    """A row for every quantile."""
    return _by_contestant(
        _select(result, "wake-up"),
        title="Wake-up of an idle event loop, ns from put in another thread to the item in the waiting coroutine",
        note="Medians over samples of the quantile within each.",
        row=lambda figure: figure.step,
    )


def trajectories(result: Result) -> Sheet:
    """One row."""
    return _by_contestant(
        _select(result, "pipeline"),
        title="A trajectory's whole life in the pipeline, ns",
        note="Scripted engine and trainer on the virtual clock: nobody really waits, so it is all the controller's "
        "work, token by token. bare tasks: an asyncio task per trajectory that sleeps as often.",
        row=lambda figure: figure.work,
    )


def print_tables(result: Result, console: Console) -> None:
    """Print everything."""
    for sheet in sheets(result):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for index, name in enumerate(sheet.header):
            column = name if index < sheet.names else name.replace(" ", "\n", 1)
            table.add_column(column, justify="left" if index < sheet.names else "right", overflow="fold")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(sheet.title, style="bold", highlight=False, markup=False)
        console.print(sheet.note, highlight=False, markup=False)
        console.print(table)
    for line in (*result.notes, result.summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def markdown(result: Result) -> str:
    """The same as a page."""
    parts = [result.summary, *result.notes]
    for sheet in sheets(result):
        marks = ["---" if index < sheet.names else "--:" for index in range(len(sheet.header))]
        lines = ["| " + " | ".join(row) + " |" for row in (sheet.header, marks, *sheet.rows)]
        parts += [f"### {sheet.title}", sheet.note, "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _select(result: Result, part: str) -> Iterator[Figure]:
    return (figure for figure in result.figures if figure.part == part)


def _cell(figure: Figure) -> tuple[int, int, int]:
    setting = figure.setting
    return setting["batch_size"], setting["max_staleness"], setting["live"]


def _by_contestant(figures: Iterable[Figure], *, title: str, note: str, row: Callable[[Figure], str]) -> Sheet:
    values = {(row(figure), figure.contestant): _ns(figure.value) for figure in figures}
    rows, contestants = (list(dict.fromkeys(names)) for names in (zip(*values, strict=True) if values else ((), ())))
    return Sheet(
        title=title,
        note=note,
        header=["", *contestants],
        names=1,
        rows=[[name, *(values.get((name, contestant), NOTHING) for contestant in contestants)] for name in rows],
    )


def _ns(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    if not found:
        return NOTHING
    return f"{_ns(statistics.median(found))} ({_ns(found[0])}–{_ns(found[-1])})"


def _ratio(slow: dict[tuple[int, int, int], float], fast: dict[tuple[int, int, int], float]) -> str:
    both = [slow[cell] / fast[cell] for cell in slow.keys() & fast.keys()]
    return f"{statistics.median(both):.1f}" if both else NOTHING
