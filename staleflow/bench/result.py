"""What a benchmark leaves behind, as data: raw figures, and the machine and versions they are of."""

import os
import platform
import statistics
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

FORMAT = 1
ROOT = Path(__file__).parents[2]
"""Of the source tree, if this is one."""

Part = Literal["ledger", "memory", "queue", "wake-up", "pipeline"]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was measured of one contestant; ``samples`` are per item, in ``unit``.

    ``work`` and ``step`` name what was done, ``setting`` under which sizes.
    """

    part: Part
    work: str
    step: str
    contestant: str
    setting: dict[str, int]
    unit: Literal["ns", "bytes"]
    samples: list[float]

    @property
    def value(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured; the load average is of the minute before."""

    processor: str
    cores: int
    system: str
    load_average: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run of the benchmark; ``notes`` say what is missing and why."""

    format: int
    date: str
    machine: Machine
    versions: dict[str, str]
    commit: str | None
    quick: bool
    notes: list[str]
    figures: list[Figure]

    @property
    def summary(self) -> str:
        """Date, machine and versions in one sentence."""
        machine = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.date}, {machine.cores} cores of {machine.processor}, {machine.system}, "
            f"load average {machine.load_average:.2f} before; {versions}; commit {self.commit or 'unknown'}."
        )


def this_machine() -> Machine:
    """Describe the machine this runs on."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        load_average=os.getloadavg()[0],
    )


def versions() -> dict[str, str]:
    """Versions of everything whose speed is measured."""
    found = {"Python": platform.python_version()}
    for package in ("staleflow", "uvloop"):
        # Neither need be installed: staleflow runs from its source tree too, and uvloop is not to be had everywhere.
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    rustc = _output("rustc", "--version")
    return found | ({"rustc": rustc.split()[1]} if rustc else {})


def commit() -> str | None:
    """The commit of the source tree, with a plus if it was changed since; None outside of one."""
    if not (ROOT / ".git").exists():
        return None
    return _output("git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+")


def today() -> str:
    """The local date and time, to the minute."""
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M %z}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
