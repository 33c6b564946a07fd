"""The figures as a picture. Needs matplotlib, which nothing else in staleflow does."""

from importlib.util import find_spec
from pathlib import Path

from staleflow.bench.result import Figure, Result

MISSING = "No plot: matplotlib is not installed. Install it with: pip install 'staleflow[bench]'"
STYLES = {"Rust": "o", "Python": "s", "twin": "x"}
COLOURS = {"bulk": "tab:blue", "single": "tab:orange", "members": "tab:green"}


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write(result: Result, path: Path) -> None:
    """Draw the ledger's lives in every cell, and the queues for every number of producers."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(13, 6), layout="constrained")
    ledger, queue = picture.subplots(1, 2, width_ratios=[2, 1])
    lives = [figure for figure in result.figures if figure.part == "ledger" and figure.step == "life"]
    cells = sorted({tuple(figure.setting.values()) for figure in lives})
    for contestant, marker in STYLES.items():
        for life, colour in COLOURS.items():
            values = {tuple(f.setting.values()): f.value for f in lives if (f.contestant, f.work) == (contestant, life)}
            places = [index for index, cell in enumerate(cells) if cell in values]
            heights = [values[cells[index]] for index in places]
            ledger.plot(places, heights, marker, color=colour, label=f"{contestant}, {life}")
    labels = [" / ".join(f"{size:,}" for size in cell) for cell in cells]
    ledger.set_xticks(range(len(cells)), labels, rotation=90, fontsize=7)
    ledger.set(yscale="log", ylabel="ns per group", xlabel="B / eta / live", title="A group's life in the ledger")
    # Room for the legend above the points.
    ledger.set_ylim(top=ledger.get_ylim()[1] * 3)
    ledger.legend(fontsize=7, ncols=3, loc="upper left")

    transfers = [figure for figure in result.figures if figure.part == "queue" and figure.work == "transfer"]
    for contestant in dict.fromkeys(figure.contestant for figure in transfers):
        points = sorted((_producers(figure), figure.value) for figure in transfers if figure.contestant == contestant)
        queue.plot(*zip(*points, strict=True), "o-", label=contestant)
    queue.set(yscale="log", ylabel="ns per item", xlabel="producer threads", title="Through a queue")
    if transfers:
        queue.legend(fontsize=7)
    picture.suptitle(result.summary, fontsize=7, wrap=True)
    picture.savefig(path, dpi=150)


def _producers(figure: Figure) -> int:
    return figure.setting["producers"]
