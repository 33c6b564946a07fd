"""What staleness does to learning: the arithmetic job under several bounds and several losses for stale data.

``make sweep``. Every run starts from the same warm-started model and differs in nothing but loss, ``max_staleness`` and
when engines pull. In the demo they pull every version at once and so data is about as fresh as it can be, whatever the
bound. Here they pull late (:class:`PullLate`), so that data is as stale as the bound allows.

Finished runs are kept and not run again, so that a sweep can be interrupted and gone on with.
"""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from rich.console import Console

import staleflow
from staleflow.bench.result import commit, this_machine, today
from staleflow.coordinator import Command, Coordinator, Health, LeastLoad, Snapshot, Sync
from staleflow.errors import StaleflowError
from staleflow.plot import drawing
from staleflow.plot.curve import Curve, read_curve
from staleflow.trainer.loss_settings import BY_NAME

ROOT = Path(__file__).parents[1]
LOSSES = ("ppo", "decoupled_ppo", "tis", "m2po", "sat")
BOUNDS = (0, 1, 4, 16)
COMPARED = "decoupled_ppo"
"""The loss that is also run with engines that pull at once."""
BARS = "▁▂▃▄▅▆▇█"
SMOOTH_STEPS = 20
Pulls: TypeAlias = Literal["late", "at once"]


class PullLate:
    """As :class:`LeastLoad`, but an engine pulls only what it cannot do without.

    That is, when it is ``max_staleness`` versions behind, so that soon the ledger would admit nothing at its version,
    or when a request waits for a newer one, as those of an evaluation do.
    """

    def __init__(self, max_staleness: int) -> None:
        self._least_load = LeastLoad()
        # An engine that has the newest version has nothing to pull.
        self._behind = max(1, max_staleness)

    def decide(self, snapshot: Snapshot) -> list[Command]:
        """See :class:`Coordinator`."""
        version = {engine.engine: engine.version for engine in snapshot.engines}
        asked_for = max((request.min_version for request in snapshot.waiting), default=0)
        return [
            command
            for command in self._least_load.decide(snapshot)
            if not isinstance(command, Sync)
            or snapshot.engines[command.engine].health is Health.STALE
            or snapshot.published - version[command.engine] >= self._behind
            or version[command.engine] < asked_for
        ]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of a sweep have in common. Its hash names the folder that keeps them."""

    steps: int
    seed: int
    version: int = 1  # raise it when the code below changes what is run
    batch_size: int = 64
    group_size: int = 4
    learning_rate: float = 7e-4  # kept to the end, so that fewer steps are the beginning of more
    warmup_steps: int = 10
    evaluate_every_steps: int = 50

    @property
    def folder(self) -> str:
        """The name of this recipe's folder."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """What one run has for itself."""

    loss: str
    max_staleness: int
    pulls: Pulls

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.loss}-{self.max_staleness}-{self.pulls.replace(' ', '-')}"

    def __str__(self) -> str:
        return f"{self.loss}, max_staleness {self.max_staleness}, engines pull {self.pulls}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run. ``accuracy`` is by step; ``wall_s`` is from the first evaluation to the last one."""

    variant: Variant
    date: str
    commit: str | None
    accuracy: dict[int, float]
    wall_s: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[int, int]
    trainer_wait_s: float
    rollout_wait_s: float


Play: TypeAlias = Callable[[Variant, Recipe, Path], staleflow.Report]


def variants(losses: Sequence[str], bounds: Sequence[int]) -> Iterator[Variant]:
    """Every loss with every bound; and, where that makes a difference, with engines that pull at once."""
    for loss in losses:
        for bound in bounds:
            yield Variant(loss=loss, max_staleness=bound, pulls="late")
            if loss == COMPARED and bound > 1:
                yield Variant(loss=loss, max_staleness=bound, pulls="at once")


def play(variant: Variant, recipe: Recipe, folder: Path) -> staleflow.Report:
    """One run, into a folder that does not exist yet."""
    # Imported here because it imports torch, which takes seconds in which Ctrl-C should work as in all others.
    from arithmetic import rollout
    from warm_start import problems, warm_started_model

    train, held_out = problems(recipe.seed)
    model = warm_started_model(ROOT / ".cache", seed=recipe.seed)
    coordinator: Coordinator = PullLate(variant.max_staleness) if variant.pulls == "late" else LeastLoad()
    pipeline = staleflow.Pipeline(
        tasks=staleflow.ListTasks(train, seed=recipe.seed),
        rollout=rollout,
        engines=[staleflow.EmbeddedEngine(model, seed=recipe.seed)],
        trainer=staleflow.LocalTrainer(
            model, loss=variant.loss, learning_rate=recipe.learning_rate, warmup_steps=recipe.warmup_steps
        ),
        config=staleflow.Config(
            steps=recipe.steps,
            batch_size=recipe.batch_size,
            group_size=recipe.group_size,
            max_staleness=variant.max_staleness,
            evaluate_every_steps=recipe.evaluate_every_steps,
        ),
        held_out=held_out,
        coordinator=coordinator,
        run_dir=folder,
    )
    return staleflow.run(pipeline)


def outcome_of(variant: Variant, recipe: Recipe, folder: Path, play: Play) -> Outcome:
    """What came of the run, which is run now unless it has been already."""
    path = folder / "outcome.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    if folder.exists():
        # It was interrupted.
        shutil.rmtree(folder)
    report = play(variant, recipe, folder)
    evaluations = read_curve(folder, "").evaluations
    outcome = Outcome(
        variant=variant,
        date=today(),
        commit=commit(),
        accuracy={evaluation.step: evaluation.reward for evaluation in evaluations},
        wall_s=evaluations[-1].t - evaluations[0].t,
        staleness_mean=report.staleness_mean,
        staleness_max=report.staleness_max,
        staleness_histogram=report.staleness_histogram,
        trainer_wait_s=report.trainer_wait_s,
        rollout_wait_s=report.rollout_wait_s,
    )
    unfinished = path.with_suffix(".partial")
    unfinished.write_bytes(msgspec.json.encode(outcome))
    unfinished.rename(path)
    return outcome


def sweep(
    chosen: Sequence[Variant], recipe: Recipe, folder: Path, console: Console, play: Play = play
) -> tuple[list[Outcome], int]:
    """All runs, those that are missing run now; returns what came of them, and how many failed."""
    outcomes = []
    for number, variant in enumerate(chosen, start=1):
        known = (folder / variant.folder / "outcome.json").exists()
        _say(console, f"run {number} of {len(chosen)}: {variant}{' (known)' if known else ''}")
        try:
            outcomes.append(outcome_of(variant, recipe, folder / variant.folder, play))
        except StaleflowError as error:
            _say(console, f"failed: {error}")
    return outcomes, len(chosen) - len(outcomes)


def markdown(outcomes: Sequence[Outcome], recipe: Recipe) -> str:
    """The table, and what it is of."""
    machine, steps = this_machine(), sorted(set[int]().union(*(outcome.accuracy for outcome in outcomes)))
    commits = sorted({outcome.commit or "unknown" for outcome in outcomes})
    dates = sorted(outcome.date for outcome in outcomes)
    heads = ["loss", "max_staleness", "engines pull", "staleness mean", "max", "from 0 to max"]
    heads += [f"accuracy at {step}" for step in steps[:-1]]
    heads += ["at the end", "wall, s", "trainer waits, s", "engine waits, s"]
    rows = [_row(outcome, steps) for outcome in outcomes]
    lines = [heads, ["---"] * 3 + ["--:"] * 2 + ["---"] + ["--:"] * (len(heads) - 6), *rows]
    summary = (
        f"{recipe.steps} steps of {recipe.batch_size} groups of {recipe.group_size}, seed {recipe.seed}, one run each; "
        f"{dates[0]} to {dates[-1]}, commit {', '.join(commits)}, {machine.cores} cores of {machine.processor}."
    )
    return "\n".join([summary, "", *(f"| {' | '.join(cells)} |" for cells in lines), ""])


def _row(outcome: Outcome, steps: Sequence[int]) -> list[str]:
    variant = outcome.variant
    return [
        variant.loss,
        str(variant.max_staleness),
        variant.pulls,
        f"{outcome.staleness_mean:.2f}",
        str(outcome.staleness_max),
        f"`{bars(outcome.staleness_histogram)}`",
        *(f"{outcome.accuracy[step]:.3f}" if step in outcome.accuracy else "–" for step in steps),
        f"{outcome.wall_s:.0f}",
        f"{outcome.trainer_wait_s:.0f}",
        f"{outcome.rollout_wait_s:.0f}",
    ]


def bars(histogram: Mapping[int, int]) -> str:
    """A histogram in one line, from 0 to its largest key; none is a space."""
    counts = [histogram.get(gap, 0) for gap in range(max(histogram, default=0) + 1)]
    most = max(counts)
    return "".join(BARS[(len(BARS) - 1) * count // most] if count else " " for count in counts)


def draw(outcomes: Sequence[Outcome], folder: Path, path: Path) -> None:
    """Accuracy against steps and wall time, and the staleness, a column for each loss."""
    from matplotlib.figure import Figure

    losses = list(dict.fromkeys(outcome.variant.loss for outcome in outcomes))
    bounds = sorted({outcome.variant.max_staleness for outcome in outcomes})
    picture = Figure(figsize=(4 * len(losses) + 1, 11), layout="constrained")
    axes = picture.subplots(3, len(losses), sharey="row", squeeze=False)
    for outcome in outcomes:
        variant = outcome.variant
        column = axes[:, losses.index(variant.loss)]
        label = f"{variant.max_staleness}" + (", pulled at once" if variant.pulls == "at once" else "")
        curve = _from_first_evaluation(read_curve(folder / variant.folder, label))
        # One colour a bound; what is there only to be compared with is paler.
        colour = (f"C{bounds.index(variant.max_staleness)}", 0.4 if variant.pulls == "at once" else 1.0)
        drawing.draw_reward(column[0], curve, colour, against="step", smooth_steps=SMOOTH_STEPS)
        drawing.draw_reward(column[1], curve, colour, against="t", smooth_steps=SMOOTH_STEPS)
        drawing.draw_staleness(column[2], curve, colour, against="step", smooth_steps=SMOOTH_STEPS)
    for column, loss in zip(axes.T, losses, strict=True):
        column[0].set(title=loss, xlabel=drawing.TITLES["step"])
        column[1].set(xlabel=drawing.TITLES["t"])
        column[2].set(xlabel=drawing.TITLES["step"])
        column[0].legend(title="max_staleness", fontsize=8)
    axes[0, 0].set(ylabel="reward (line), held out (points)")
    axes[1, 0].set(ylabel="reward (line), held out (points)")
    axes[2, 0].set(ylabel="staleness: mean (line), largest (dotted)")
    picture.savefig(path, dpi=100)


def _from_first_evaluation(curve: Curve) -> Curve:
    """The curve with its time from there, so that it does not show how long processes take to start."""
    begin_s = curve.evaluations[0].t
    return msgspec.structs.replace(
        curve,
        steps=[msgspec.structs.replace(step, t=step.t - begin_s) for step in curve.steps],
        evaluations=[msgspec.structs.replace(found, t=found.t - begin_s) for found in curve.evaluations],
    )


def main() -> int:
    """Do what the command line asks for; returns the exit code."""
    options = _options()
    sys.path.append(str(ROOT / "examples"))
    console = Console()
    recipe = Recipe(steps=options.steps, seed=options.seed)
    folder = options.runs / recipe.folder
    outcomes, failed = sweep(list(variants(options.losses, options.staleness)), recipe, folder, console)
    if not outcomes:
        return 1
    table = markdown(outcomes, recipe)
    console.print(table, highlight=False, markup=False, soft_wrap=True)
    (options.out / "staleness_sweep.md").write_text(table)
    (options.out / "staleness_sweep.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)) + b"\n")
    if drawing.is_possible():
        draw(outcomes, folder, options.out / "staleness_sweep.png")
    else:
        _say(console, drawing.MISSING)
    _say(console, f"Written to {options.out}" + (f"; {failed} runs failed" if failed else ""))
    return 1 if failed else 0


def _say(console: Console, what: str) -> None:
    console.print(what, highlight=False, markup=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run the arithmetic job with several bounds on staleness and several losses, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="train steps of each run")
    parser.add_argument("--losses", nargs="+", choices=sorted(BY_NAME), default=list(LOSSES), metavar="LOSS")
    parser.add_argument("--staleness", nargs="+", type=int, default=list(BOUNDS), metavar="BOUND")
    parser.add_argument("--seed", type=int, default=1, help="of the model, the order of tasks and the sampler")
    parser.add_argument("--out", type=Path, default=ROOT / "benches", help="where to write table, figures and picture")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "staleness-sweep", help="where runs are kept")
    options = parser.parse_args()
    if not options.out.is_dir():
        parser.error(f"{options.out} is no folder; choose one with --out")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
