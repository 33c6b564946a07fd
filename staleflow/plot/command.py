"""``staleflow plot``: draws what runs have learned from their folders."""

import argparse
import sys
from pathlib import Path

from staleflow.errors import ConfigError
from staleflow.plot import drawing
from staleflow.plot.curve import read_curve


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Offer ``plot``."""
    parser = subparsers.add_parser(
        "plot",
        help="draw the reward and the staleness of runs",
        description="Draws the mean reward of the batches, the held-out accuracy and the staleness of runs, "
        "against steps and wall time. A run may still go on.",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the picture; its ending says which kind"
    )
    parser.add_argument(
        "--label",
        action="append",
        metavar="TEXT",
        help="name of a run in the picture, once for each run, in their order (default: the folder's name)",
    )
    parser.add_argument(
        "--smooth", type=int, default=20, metavar="STEPS", help="batches that a mean is taken over (default: 20)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for; returns the exit code."""
    run_dirs, out = arguments.run_dirs, arguments.out
    labels = arguments.label or [path.resolve().name for path in run_dirs]
    if len(labels) != len(run_dirs):
        raise ConfigError(
            f"label is given {len(labels)} times for {len(run_dirs)} runs; give it once for each, or never"
        )
    if arguments.smooth < 1:
        raise ConfigError(f"smooth is {arguments.smooth}; it must be at least 1")
    curves = [read_curve(path, label) for path, label in zip(run_dirs, labels, strict=True)]
    if not drawing.is_possible():
        print(f"staleflow: {drawing.MISSING}", file=sys.stderr)
        return 1
    if out.suffix[1:] not in drawing.formats():
        raise ConfigError(f"out is {str(out)!r}; its ending must be one of {', '.join(drawing.formats())}")
    drawing.draw(curves, out, smooth_steps=arguments.smooth)
    print(f"Written to {out}")
    return 0
