"""The core without Python around it: runs ``cargo bench`` in the source tree and reads what criterion measured.

A criterion benchmark of the ledger is named ``ledger/<work>/<step>/<contestant>/<setting>``, its setting a list like
``B=64 eta=4 live=0``; one of the queue ``queue/<contestant>/<producers>``. The throughput says how many items an
iteration has. The memory benchmark prints JSON lines.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from staleflow.bench.plan import Cell
from staleflow.bench.result import ROOT, Figure

CORE = ROOT / "core-rs" / "staleflow-core"
HOW_TO = "run `staleflow bench` from a source tree with cargo in PATH, or `cargo bench -p staleflow-core` there"
NAMES = {"B": "batch_size", "eta": "max_staleness"}
OURS = ("staleflow", "trajectory_queue")
ERROR_LINES = 20


class _Benchmark(msgspec.Struct):
    """What criterion's ``benchmark.json`` says, as far as it matters here."""

    group_id: str
    function_id: str
    value_str: str
    throughput: dict[str, int]


class _Sample(msgspec.Struct):
    """Criterion's ``sample.json``: iterations and nanoseconds of every sample."""

    iters: list[float]
    times: list[float]


class _Memory(msgspec.Struct):
    """A line of the memory benchmark."""

    batch_size: int
    max_staleness: int
    live: int
    group_size: int
    bytes: int


def why_not() -> str | None:
    """Why the core cannot be measured alone here, and what to do about it; None if it can."""
    if not CORE.is_dir():
        return f"Nothing of the core alone: this is not a source tree; {HOW_TO}."
    if shutil.which("cargo") is None:
        return f"Nothing of the core alone: cargo is not installed; {HOW_TO}."
    return None


def benches() -> list[str]:
    """The core's benchmarks, by file name."""
    return sorted(path.stem for path in (CORE / "benches").glob("*.rs"))


def measure(bench: str, cells: tuple[Cell, ...], progress: Callable[[str], None]) -> list[Figure]:
    """Build and run one of them; the ledger's only in these cells.

    Raises:
        subprocess.CalledProcessError: cargo failed; ``output`` has its last lines.
    """
    command = ["cargo", "bench", "--package", "staleflow-core", "--bench", bench]
    if bench == "ledger":
        ids = "|".join(f"B={cell.batch_size} eta={cell.max_staleness} live={cell.live}$" for cell in cells)
        command += ["--", ids]
    with tempfile.TemporaryDirectory() as folder:
        lines = list(_run(command, Path(folder), progress))
        return list(memory(lines) if bench == "memory" else criterion(Path(folder)))


def _run(command: list[str], criterion_home: Path, progress: Callable[[str], None]) -> Iterator[str]:
    environment = os.environ | {"CRITERION_HOME": str(criterion_home)}
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as cargo:
        assert cargo.stdout is not None
        for line in cargo.stdout:
            lines.append(line.rstrip())
            progress(line.strip().removeprefix("Benchmarking "))
            yield lines[-1]
    if cargo.returncode:
        raise subprocess.CalledProcessError(cargo.returncode, command, output="\n".join(lines[-ERROR_LINES:]))


def memory(lines: list[str]) -> Iterator[Figure]:
    """What the memory benchmark printed."""
    for line in lines:
        if line.startswith("{"):
            found = msgspec.json.decode(line, type=_Memory)
            yield Figure(
                part="memory",
                work="live group",
                step=f"of {found.group_size}",
                contestant="Rust",
                setting={"batch_size": found.batch_size, "max_staleness": found.max_staleness, "live": found.live},
                unit="bytes",
                samples=[found.bytes / found.live],
            )


def criterion(home: Path) -> list[Figure]:
    """What criterion left in its folder; what is ours first."""
    return sorted(map(_criterion, home.glob("**/new/benchmark.json")), key=lambda figure: figure.contestant)


def _criterion(path: Path) -> Figure:
    benchmark = msgspec.json.decode(path.read_bytes(), type=_Benchmark)
    sample = msgspec.json.decode(path.with_name("sample.json").read_bytes(), type=_Sample)
    items = benchmark.throughput["Elements"]
    part, work, step = [*benchmark.group_id.split("/"), "transfer", "item"][:3]
    return Figure(
        part="queue" if part == "queue" else "ledger",
        work=work,
        step=step,
        contestant="Rust" if benchmark.function_id in OURS else f"Rust {benchmark.function_id.replace('_', ' ')}",
        setting=_setting(benchmark.value_str),
        unit="ns",
        samples=[time / (iters * items) for iters, time in zip(sample.iters, sample.times, strict=True)],
    )


def _setting(text: str) -> dict[str, int]:
    """``B=64 eta=4 live=0``, or a number of producers."""
    pairs = [pair.partition("=") for pair in text.split()]
    return {NAMES.get(name, name) if value else "producers": int(value or name) for name, _, value in pairs}
