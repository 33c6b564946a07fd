import shutil
from pathlib import Path

import pytest
from support import Scripted

from staleflow import Config
from staleflow.cli import main
from staleflow.errors import RunFolderError
from staleflow.plot import drawing
from staleflow.plot.curve import read_curve, smoothed

PNG = b"\x89PNG"


@pytest.fixture
def run_dir(scripted: Scripted) -> Path:
    """Of a run of six steps, evaluated before the first, after every second and after the last."""
    config = Config(steps=6, batch_size=2, group_size=2, max_staleness=1, evaluate_every_steps=2)
    run = scripted(config, held_out=range(4))
    run.run()
    return run.run_dir


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plot", *map(str, arguments)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("staleflow: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_curve_is_what_the_run_has_measured(run_dir: Path) -> None:
    curve = read_curve(run_dir, "a run")
    assert [step.step for step in curve.steps] == list(range(6))
    assert [evaluation.step for evaluation in curve.evaluations] == [0, 2, 4, 6]
    assert all(step.staleness_max <= 1 for step in curve.steps)
    assert curve.evaluations[0].t < curve.steps[0].t < curve.steps[-1].t <= curve.evaluations[-1].t


def test_line_that_is_still_being_written_is_left_out(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (run_dir / name).write_bytes((run_dir / name).read_bytes()[:-1])
    with (run_dir / "events.jsonl").open("ab") as events:
        events.write(b'\n{"event":"evaluated","t":9')
    curve = read_curve(run_dir, "")
    assert (len(curve.steps), len(curve.evaluations)) == (5, 4)


def test_smoothed_value_is_the_mean_of_the_last_ones() -> None:
    assert smoothed([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]
    assert smoothed([1.0, 2.0, 3.0], 9) == [1.0, 1.5, 2.0]
    assert smoothed([1.0, 2.0], 1) == [1.0, 2.0]
    assert smoothed([], 3) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_folder_that_is_no_run_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (run_dir / name).unlink()
    assert f"{run_dir / name} does not exist" in complaint(capsys, run_dir, "--out", tmp_path / "curve.png")
    assert "does not exist" in complaint(capsys, tmp_path / "nowhere", "--out", tmp_path / "curve.png")
    assert "does not exist" in complaint(capsys, run_dir / "config.json", "--out", tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_run_without_steps_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "metrics.jsonl").write_bytes(b'{"step":0,')
    assert f"{run_dir} has no step yet" in complaint(capsys, run_dir, "--out", "curve.png")


@pytest.mark.parametrize("damage", [b"\n", b'{"step":1}\n', b"\xff\n"])
def test_damaged_line_is_named(run_dir: Path, damage: bytes) -> None:
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_bytes(b"".join([*lines[:2], damage, *lines[2:]]))
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 3 cannot be read"):
        read_curve(run_dir, "")


def test_settings_that_cannot_be_are_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert "label is given 1 times for 2 runs" in complaint(
        capsys, run_dir, run_dir, "--label", "a", "--out", "curve.png"
    )
    assert "smooth is 0" in complaint(capsys, run_dir, "--smooth", 0, "--out", "curve.png")
    assert "must be one of" in complaint(capsys, run_dir, "--out", "curve.words")


def test_picture_without_a_folder_to_go_to_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert "nowhere/curve.png" in complaint(capsys, run_dir, "--out", tmp_path / "nowhere" / "curve.png")


def test_without_matplotlib_it_says_how_to_get_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "is_possible", lambda: False)
    assert "pip install 'staleflow[bench]'" in complaint(capsys, run_dir, "--out", "curve.png")


def test_picture_shows_each_run_under_its_label(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)
    out = tmp_path / "curve.png"
    assert main(["plot", str(run_dir), str(other), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"Written to {out}\n"
    assert out.read_bytes().startswith(PNG)
    vector = tmp_path / "curve.svg"
    assert main(["plot", str(run_dir), str(other), "--label", "one", "--label", "two", "--out", str(vector)]) == 0
    assert "<!-- one -->" in vector.read_text()
    assert "<!-- two -->" in vector.read_text()
