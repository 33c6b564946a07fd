import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parent.parent


def run_example(name: str, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_the_readme_shows_the_letters_example_in_at_most_30_lines() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    example = (ROOT / "examples/letters.py").read_text()
    assert example in blocks
    assert len(example.splitlines()) <= 30


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_letters_example_learns(tmp_path: Path) -> None:
    finished = run_example("letters.py", folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    rewards = re.search(r"reward (\d\.\d+) -> (\d\.\d+)", finished.stdout)
    assert rewards is not None
    before, after = float(rewards[1]), float(rewards[2])
    assert before < 0.3
    assert after > 0.8


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_arithmetic_example_writes_a_verdict_that_adds_up(tmp_path: Path) -> None:
    # Too few steps to learn: this checks the whole path, and that a run that falls short says so.
    finished = run_example("arithmetic.py", "--steps", "6", "--run-dir", "run", folder=tmp_path)
    assert finished.returncode == 1, finished.stderr
    verdict = msgspec.json.decode((tmp_path / "run/verdict.json").read_bytes())
    assert verdict["passed"] is False
    assert verdict["accuracy_after"] < 0.9
    assert any("accuracy after" in shortfall for shortfall in verdict["shortfalls"])
    assert verdict["steps"] == 6
    assert verdict["staleness_max"] <= 2
    accounting = verdict["accounting"]
    config = msgspec.json.decode((tmp_path / "run/config.json").read_bytes())["config"]
    assert accounting["trained"] == verdict["steps"] * config["batch_size"]
    assert accounting["trained"] * config["group_size"] == verdict["trained_trajectories"]
    ended = sum(accounting["filtered"].values()) + sum(accounting["aborted"].values()) + accounting["expired"]
    live = accounting["running"] + accounting["complete"] + accounting["leased"]
    assert accounting["admitted"] == accounting["trained"] + ended + live
    for name in ("config.json", "metrics.jsonl", "events.jsonl", "checkpoint/model.safetensors"):
        assert (tmp_path / "run" / name).stat().st_size > 0
