import errno
import json
from pathlib import Path
from typing import Any

import pytest
from support import Scripted, ScriptedRun, virtually

from staleflow import Config, StalenessLedger, uniform_rewards
from staleflow.errors import ConfigError, RunFolderError
from staleflow.events import Consumed, Published
from staleflow.run_folder import RunFolder
from staleflow.testing import ScriptedTrainer

CONFIG = Config(steps=4, batch_size=2, group_size=2)


def test_everything_a_run_leaves(scripted: Scripted) -> None:
    run = scripted(CONFIG)
    run.run()
    assert sorted(path.name for path in run.run_dir.iterdir()) == [
        "config.json",
        "events.jsonl",
        "ledger.journal",
        "logs",
        "metrics.jsonl",
    ]
    assert json.loads((run.run_dir / "config.json").read_text())["config"]["steps"] == 4
    metrics = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [0, 1, 2, 3]
    assert list(run.weights.iterdir()) == []


def test_events_are_on_disk_after_every_step(scripted: Scripted) -> None:
    seen: list[int] = []

    class Looks(ScriptedTrainer):
        async def step(self, batch: Any) -> Any:
            seen.append(len(run.events_of(Consumed)))
            return await super().step(batch)

    run: ScriptedRun = scripted(CONFIG, trainer=Looks())
    run.run()
    assert seen == [0, 1, 2, 3]


def test_journal_gives_the_ledger_back_as_of_every_event(scripted: Scripted) -> None:
    run = scripted(CONFIG, group_filter=uniform_rewards)
    report = run.run()
    replay = StalenessLedger.replay((run.run_dir / "ledger.journal").read_bytes())
    last_at = {now_s: (ledger.next_batch, ledger.published) for now_s, ledger in replay}
    for consumed in run.events_of(Consumed):
        assert last_at[round(consumed.t, 6)] == (consumed.batch + 1, consumed.batch)
    for publication in run.events_of(Published):
        assert last_at[round(publication.t, 6)][1] == publication.version
    accounting = replay.ledger.statistics()
    assert (accounting.admitted, accounting.trained) == (report.accounting.admitted, report.accounting.trained)
    assert (accounting.filtered, accounting.aborted) == (report.accounting.filtered, report.accounting.aborted)


def test_folder_that_holds_a_run_is_refused_and_untouched(scripted: Scripted) -> None:
    first = scripted(CONFIG)
    first.run()
    before = {path: path.read_bytes() for path in first.run_dir.iterdir() if path.is_file()}
    second = scripted(CONFIG, run_dir=first.run_dir)
    with pytest.raises(RunFolderError, match=r"already holds a run; choose another with run_dir"):
        virtually(second.pipeline.run())
    assert {path: path.read_bytes() for path in first.run_dir.iterdir() if path.is_file()} == before
    assert list(second.weights.iterdir()) == []


def test_folder_that_cannot_be_made_is_named(scripted: Scripted, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = scripted(CONFIG, run_dir=tmp_path / "file" / "run")
    with pytest.raises(RunFolderError, match=r"cannot write .*/file/run: Not a directory"):
        virtually(run.pipeline.run())
    assert list(run.weights.iterdir()) == []


def test_read_only_folder_is_named(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    run = scripted(CONFIG)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunFolderError, match=r"cannot write .*/run: Read-only file system"):
        virtually(run.pipeline.run())


def fill_disk(folder: RunFolder, buffer_bytes: int = 1 << 20) -> None:
    folder._events.close()
    folder._events = open("/dev/full", "wb", buffering=buffer_bytes)  # noqa: SIM115


@pytest.mark.parametrize("buffer_bytes", [0, 1 << 20], ids=["at an event", "at a flush"])
def test_full_disk_ends_the_run_in_order(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    opened: list[RunFolder] = []
    original = RunFolder.__enter__

    def enter(folder: RunFolder) -> RunFolder:
        opened.append(folder)
        return original(folder)

    class FillsTheDisk(ScriptedTrainer):
        async def step(self, batch: Any) -> Any:
            if batch.step == 2:
                fill_disk(opened[0], buffer_bytes)
            return await super().step(batch)

    monkeypatch.setattr(RunFolder, "__enter__", enter)
    run = scripted(CONFIG, trainer=FillsTheDisk())
    with pytest.raises(RunFolderError, match="No space left on device"):
        virtually(run.pipeline.run())
    assert all(engine.stopped for engine in run.engines)
    assert run.trainer.stopped
    assert run.trainer.saved == [run.run_dir / "checkpoint"]
    assert list(run.weights.iterdir()) == []
    assert [event.version for event in run.events_of(Published)] == [1, 2]


def test_disk_that_fills_up_at_the_very_end_is_an_error(tmp_path: Path) -> None:
    def write() -> None:
        with RunFolder(tmp_path / "run") as folder:
            fill_disk(folder)
            folder.event(Published(0.0, 1))

    with pytest.raises(RunFolderError, match="No space left on device"):
        write()


def test_full_disk_does_not_hide_the_first_error(tmp_path: Path) -> None:
    def write() -> None:
        with RunFolder(tmp_path / "run") as folder:
            fill_disk(folder)
            folder.event(Published(0.0, 1))
            raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first"):
        write()


def test_pipeline_runs_once(scripted: Scripted) -> None:
    run = scripted(CONFIG)
    run.run()
    with pytest.raises(ConfigError, match="runs once"):
        virtually(run.pipeline.run())
