"""``staleflow bench`` on tiny sizes: its results are complete, say where they are from, and can be read back."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from staleflow._core import Refusal, StalenessLedger
from staleflow.bench import command, ledgers, plot, queues, rust, tables
from staleflow.bench.plan import FULL, LIVE, Cell, Plan
from staleflow.bench.result import Result
from staleflow.bench.turns import in_turns
from staleflow.cli import main

TINY = Plan(cells=(Cell(4, 0, 0), Cell(4, 2, 5), Cell(4, 2, 8)), groups=8, items=64, wakes=3, steps=1, samples=1)
QUIET = Console(quiet=True)

FAKE_CARGO = """#!/bin/sh
echo "   Compiling staleflow-core"
folder="$CRITERION_HOME/single_life/staleflow/cell/new"
mkdir -p "$folder"
cat > "$folder/benchmark.json" <<END
{"group_id": "ledger/single/life", "function_id": "staleflow", "value_str": "B=4 eta=2 live=5",
 "throughput": {"Elements": 4}}
END
echo '{"sampling_mode": "Flat", "iters": [10.0, 10.0], "times": [4000.0, 8000.0]}' > "$folder/sample.json"
folder="$CRITERION_HOME/queue/locked_deque/4/new"
mkdir -p "$folder"
cat > "$folder/benchmark.json" <<END
{"group_id": "queue", "function_id": "locked_deque", "value_str": "4", "throughput": {"Elements": 100}}
END
echo '{"sampling_mode": "Flat", "iters": [1.0], "times": [5000.0]}' > "$folder/sample.json"
echo '{"batch_size": 4, "max_staleness": 2, "live": 12, "group_size": 8, "bytes": 1200}'
"""


@pytest.fixture(scope="module")
def measured() -> Result:
    return command.measure(TINY, benches=[], notes=["a note"], console=QUIET)


@pytest.fixture
def cargo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a shell script in the place of cargo."""

    def install(script: str) -> None:
        path = tmp_path / "cargo"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_every_contestant_has_every_sample_of_every_step(measured: Result) -> None:
    found = {(f.part, f.work, f.step, f.contestant, *f.setting.values()) for f in measured.figures}
    assert len(found) == len(measured.figures)
    for cell in TINY.cells:
        for life in ledgers.LIVES:
            for contestant in ("Python", "twin"):
                assert ("ledger", life, "life", contestant, *msgspec.structs.astuple(cell)) in found
    for queue in queues.CONTESTANTS:
        for producers in queues.PRODUCERS:
            assert ("queue", "transfer", "item", queue, producers) in found
        for quantile in queues.QUANTILES:
            assert ("wake-up", "wake-up", quantile, queue, 1) in found
    assert {f.contestant for f in measured.figures if f.part == "pipeline"} == {"pipeline", "bare tasks"}
    for figure in measured.figures:
        assert len(figure.samples) == TINY.samples
        assert all(sample > 0 for sample in figure.samples)


def test_the_report_states_date_machine_and_versions(
    measured: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "is_possible", lambda: False)
    console = Console(record=True, file=io.StringIO(), width=200)
    command.write(measured, tmp_path, console)
    for text in (console.export_text(), (tmp_path / "bench.md").read_text()):
        for part in (measured.date, measured.machine.processor, f"Python {sys.version.split()[0]}", "a note", "twin"):
            assert part in text


def test_json_has_everything_and_reads_back(measured: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "is_possible", lambda: False)
    command.write(measured, tmp_path, QUIET)
    data = (tmp_path / "bench.json").read_bytes()
    assert msgspec.json.decode(data, type=Result) == measured
    assert set(json.loads(data)) == {"format", "date", "machine", "versions", "commit", "quick", "notes", "figures"}
    figure = {"part", "work", "step", "contestant", "setting", "unit", "samples"}
    assert all(set(each) == figure for each in json.loads(data)["figures"])


def test_a_plot_is_drawn(measured: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command.write(measured, tmp_path, QUIET)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(
    measured: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "is_possible", lambda: False)
    monkeypatch.setattr(command, "measure", lambda *_, notes, **__: msgspec.structs.replace(measured, notes=notes))
    monkeypatch.setattr(rust, "CORE", tmp_path / "no source tree")
    assert main(["bench", "--quick", "--out", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "pip install 'staleflow[bench]'" in captured.err
    assert "`cargo bench -p staleflow-core`" in captured.err
    assert "pip install 'staleflow[bench]'" in (tmp_path / "out" / "bench.md").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.json", "bench.md"]


def test_a_folder_that_cannot_be_made_is_an_error_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "cannot create the folder" in capsys.readouterr().err


def test_figures_of_cargo_are_folded_in(cargo: Callable[[str], None]) -> None:
    cargo(FAKE_CARGO)
    ledger, queue = sorted(rust.measure("ledger", TINY.cells, lambda line: None), key=lambda figure: figure.part)
    assert (ledger.part, ledger.work, ledger.step, ledger.contestant) == ("ledger", "single", "life", "Rust")
    assert (ledger.setting, ledger.samples) == ({"batch_size": 4, "max_staleness": 2, "live": 5}, [100.0, 200.0])
    assert (queue.part, queue.work, queue.contestant) == ("queue", "transfer", "Rust locked deque")
    assert (queue.setting, queue.samples) == ({"producers": 4}, [50.0])
    (memory,) = rust.measure("memory", TINY.cells, lambda line: None)
    assert (memory.part, memory.step, memory.unit, memory.value) == ("memory", "of 8", "bytes", 100.0)


def test_a_failing_cargo_is_a_note_with_its_last_lines(cargo: Callable[[str], None]) -> None:
    cargo("#!/bin/sh\necho 'error: no linker'\nexit 101\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        rust.measure("ledger", TINY.cells, lambda line: None)
    assert "no linker" in caught.value.output


@pytest.mark.parametrize("cell", [cell for cell in FULL.cells if cell.batch_size < 4096], ids=str)
def test_cells_are_lawful_and_the_fullest_ones_are_full(cell: Cell) -> None:
    world = ledgers.World(StalenessLedger, cell, 1)
    statistics = world.ledger.statistics()
    assert (statistics.running, statistics.complete) == (cell.live, 0)
    limit = cell.max_staleness * cell.batch_size
    assert cell.live <= limit
    if cell.live == limit:
        world.ledger.admit_many(world.ledger.published, cell.batch_size)
        assert isinstance(world.ledger.admit(world.ledger.published), Refusal)


def test_every_number_of_live_groups_is_in_some_cell() -> None:
    assert {cell.live for cell in FULL.cells} >= set(LIVE)


@pytest.mark.parametrize("life", ledgers.LIVES)
def test_a_life_trains_one_batch_a_turn_and_leaves_nothing_behind(life: str) -> None:
    turn, group_size, _ = ledgers.LIVES[life]
    for kind in ledgers.CONTESTANTS.values():
        world = ledgers.World(kind, Cell(4, 2, 5), group_size)
        trained = world.ledger.statistics().trained
        for _ in range(5):
            turn(world)
        statistics = world.ledger.statistics()
        assert statistics.trained == trained + 5 * 4
        assert (statistics.running, statistics.complete, statistics.leased) == (5, 0, 0)
        assert not statistics.aborted
        assert not statistics.late_completions


def test_contestants_alternate_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def contestant(name: str) -> Callable[[], dict[str, float]]:
        def sample() -> dict[str, float]:
            order.append(name)
            return {"step": float(len(order))}

        return sample

    taken = in_turns({"a": contestant("a"), "b": contestant("b")}, samples=3)
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert taken == {("a", "step"): [3.0, 6.0, 7.0], ("b", "step"): [4.0, 5.0, 8.0]}


def test_parts_without_figures_have_no_table(measured: Result) -> None:
    assert tables.sheets(msgspec.structs.replace(measured, figures=[])) == []
    assert not any("Memory" in sheet.title for sheet in tables.sheets(measured))


def test_the_command_is_installed_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "staleflow", "bench", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "--quick" in done.stdout
