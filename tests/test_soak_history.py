"""The judge of ``make chaos-resume`` acquits a history without a flaw, and names the flaw of every other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
from resumed import killed
from soak.history import judge
from support import Scripted, virtually

from staleflow import Config

CONFIG = Config(steps=12, batch_size=3, group_size=2, max_staleness=2, checkpoint_every_steps=3)
Records: TypeAlias = list[dict[str, Any]]


@pytest.fixture
def history(scripted: Scripted, tmp_path: Path) -> Path:
    """A run that was killed and resumed, with the verdict that the job writes."""
    remains = tmp_path / "killed"
    assert killed(scripted(CONFIG), 1.5, remains) is None
    run = scripted(CONFIG, resume=remains)
    report = virtually(run.pipeline.run())
    verdict = {
        "accuracy_before": 0.3,
        "accuracy_after": 0.95,
        "staleness_max": report.staleness_max,
        "accounting": report.accounting,
    }
    (run.run_dir / "verdict.json").write_bytes(msgspec.json.encode(verdict))
    return run.run_dir


def broken(run_dir: Path) -> set[str]:
    return {promise.what for promise in judge(run_dir, steps=CONFIG.steps, accuracy=0.9) if not promise.kept}


def rewrite(path: Path, change: Callable[[Records], None]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def of(events: Records, kind: str) -> Records:
    return [event for event in events if event["event"] == kind]


def test_history_of_a_resumed_run_keeps_every_promise(history: Path) -> None:
    assert '"resumed"' in (history / "events.jsonl").read_text()
    promises = judge(history, steps=CONFIG.steps, accuracy=0.9)
    assert [promise for promise in promises if not promise.kept] == []
    assert len(promises) == 8


LAW = "the law holds after every event"
TASKS = "no task skipped, none in two groups"
STEPS = "steps 0 to 11, each once"
ACCOUNTING = "the accounting law"
ACCURACY = "accuracy, held out, at least 0.90"
BOUND = "staleness at most 2"
JOURNAL = "the ledger's journal says the same"


def train_a_group_twice(events: Records) -> None:
    first, second = of(events, "consumed")[1:3]
    second["groups"][0] = first["groups"][0]


def publish_twice(events: Records) -> None:
    published = of(events, "published")[4]
    events.insert(events.index(published) + 1, published)


def train_on_what_is_too_old(events: Records) -> None:
    for event in of(events, "finished"):
        if event["group"] == of(events, "consumed")[-1]["groups"][0]:
            event["versions"][0] = 0


def finish_a_member_twice(events: Records) -> None:
    finished = of(events, "finished")[0]
    events.insert(events.index(finished) + 1, finished)


def go_back_in_time(events: Records) -> None:
    events[-1]["t"] = 0.0


def leave_a_group_untold(events: Records) -> None:
    events.remove(of(events, "completed")[5])


def admit_beyond_the_window(events: Records) -> None:
    last = of(events, "admitted")[-1]
    place = events.index(last)
    events[place:place] = [{**last, "group": 1000 + extra, "task": 1000 + extra} for extra in range(9)]


@pytest.mark.parametrize(
    "flaw",
    [
        train_a_group_twice,
        publish_twice,
        train_on_what_is_too_old,
        finish_a_member_twice,
        go_back_in_time,
        leave_a_group_untold,
        admit_beyond_the_window,
    ],
)
def test_event_that_breaks_the_law_is_found(history: Path, flaw: Callable[[Records], None]) -> None:
    rewrite(history / "events.jsonl", flaw)
    assert LAW in broken(history)


def test_task_of_two_groups_is_found(history: Path) -> None:
    def change(events: Records) -> None:
        of(events, "admitted")[7]["task"] = 6

    rewrite(history / "events.jsonl", change)
    assert broken(history) == {TASKS}


def test_skipped_task_is_found(history: Path) -> None:
    def change(events: Records) -> None:
        for event in of(events, "admitted")[5:]:
            event["task"] += 1

    rewrite(history / "events.jsonl", change)
    assert broken(history) == {TASKS}


@pytest.mark.parametrize("change", [lambda steps: steps.pop(4), lambda steps: steps.insert(4, steps[4])])
def test_step_that_is_missing_or_told_twice_is_found(history: Path, change: Callable[[Records], None]) -> None:
    rewrite(history / "metrics.jsonl", change)
    assert broken(history) == {STEPS}


def test_log_that_ends_before_the_last_step_is_found(history: Path) -> None:
    def change(events: Records) -> None:
        del events[events.index(of(events, "published")[-1]) :]

    rewrite(history / "events.jsonl", change)
    assert broken(history) == {STEPS, ACCOUNTING, JOURNAL}


@pytest.mark.parametrize("term", ["admitted", "trained", "expired", "running"])
def test_report_that_counts_otherwise_is_found(history: Path, term: str) -> None:
    verdict = json.loads((history / "verdict.json").read_text())
    verdict["accounting"][term] += 1
    (history / "verdict.json").write_text(json.dumps(verdict))
    assert broken(history) == {ACCOUNTING}


@pytest.mark.parametrize(
    ("name", "value", "promise"), [("accuracy_after", 0.89, ACCURACY), ("staleness_max", 1, BOUND)]
)
def test_figure_that_falls_short_is_found(history: Path, name: str, value: float, promise: str) -> None:
    verdict = json.loads((history / "verdict.json").read_text())
    assert verdict[name] > value
    (history / "verdict.json").write_text(json.dumps(verdict | {name: value}))
    assert broken(history) == {promise}


def test_journal_of_another_run_is_found(history: Path, scripted: Scripted) -> None:
    other = scripted(msgspec.structs.replace(CONFIG, steps=11))
    other.run()
    (history / "ledger.journal").write_bytes((other.run_dir / "ledger.journal").read_bytes())
    assert broken(history) == {JOURNAL}


@pytest.mark.parametrize("name", ["config.json", "verdict.json", "events.jsonl", "metrics.jsonl"])
def test_file_that_is_missing_or_cut_short_is_named(history: Path, name: str) -> None:
    content = (history / name).read_bytes()
    (history / name).write_bytes(content[:-5])
    [damaged] = judge(history, steps=CONFIG.steps, accuracy=0.9)
    (history / name).unlink()
    [missing] = judge(history, steps=CONFIG.steps, accuracy=0.9)
    assert not damaged.kept
    assert not missing.kept
    assert name in missing.found
