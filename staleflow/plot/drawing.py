"""Curves as a picture. Needs matplotlib, which is imported only to draw."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from staleflow.plot.curve import Curve, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

MISSING = "no plot: matplotlib is not installed. Install it with: pip install 'staleflow[bench]'"
DOTS_PER_INCH = 150
Against: TypeAlias = Literal["step", "t"]
"""What a curve is drawn against: steps, or seconds since the start of the run."""
TITLES: dict[Against, str] = {"step": "train steps", "t": "wall time, s"}


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def formats() -> list[str]:
    """The endings of the files that can be written."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def draw(curves: Sequence[Curve], path: Path, *, smooth_steps: int) -> None:
    """Reward and accuracy against steps and wall time, the staleness below; overwrites ``path``."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(13, 8), layout="constrained")
    axes = picture.subplots(2, 2, sharex="col", sharey="row", height_ratios=[2, 1])
    columns: tuple[Against, Against] = ("step", "t")
    for (above, below), against in zip(axes.T, columns, strict=True):
        for index, curve in enumerate(curves):
            draw_reward(above, curve, f"C{index % 10}", against=against, smooth_steps=smooth_steps)
            draw_staleness(below, curve, f"C{index % 10}", against=against, smooth_steps=smooth_steps)
        below.set(xlabel=TITLES[against])
    axes[0, 0].set(ylabel=f"reward, mean of {smooth_steps} batches (line);\nheld out (points)")
    axes[1, 0].set(ylabel=f"staleness of {smooth_steps} batches, versions:\nmean (line), largest (dotted)")
    axes[0, 0].legend(fontsize=8)
    picture.savefig(path, dpi=DOTS_PER_INCH)


def draw_reward(axes: "Axes", curve: Curve, colour: "ColorType", *, against: Against, smooth_steps: int) -> None:
    """The mean reward of the batches as a line, that of the held-out tasks as points."""
    rewards = smoothed([step.reward_mean for step in curve.steps], smooth_steps)
    axes.plot(_steps(curve, against), rewards, color=colour, label=curve.label)
    places = [evaluation.step if against == "step" else evaluation.t for evaluation in curve.evaluations]
    axes.plot(places, [evaluation.reward for evaluation in curve.evaluations], "o", color=colour, markersize=5)


def draw_staleness(axes: "Axes", curve: Curve, colour: "ColorType", *, against: Against, smooth_steps: int) -> None:
    """The mean staleness of the last batches' tokens as a line, the largest as a dotted one."""
    places, largest = _steps(curve, against), [step.staleness_max for step in curve.steps]
    largest = [max(largest[max(0, end - smooth_steps) : end]) for end in range(1, len(largest) + 1)]
    axes.plot(places, smoothed([step.staleness_mean for step in curve.steps], smooth_steps), color=colour)
    axes.plot(places, largest, ":", color=colour)


def _steps(curve: Curve, against: Against) -> list[float]:
    # A step is drawn where its version is published, as the evaluation of that version is.
    return [step.step + 1 if against == "step" else step.t for step in curve.steps]
