"""The disk is full while the real trainer saves: the checkpoint before stays whole, and training can go on."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from models import ALPHABET, pair

from staleflow import LocalTrainer, StalenessLedger
from staleflow.checkpoints import Checkpoints, open_checkpoint
from staleflow.cut import Cut, HistorySizes, Recorded
from staleflow.errors import TrainerError
from staleflow.process import Child
from staleflow.testing import character_llama
from staleflow.trainer.learner import Learner

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


def cut(step: int) -> Cut:
    recorded = Recorded(
        started_s=0.0,
        t=0.0,
        noted_s=0.0,
        training_s=0.0,
        trainer_wait_s=0.0,
        rollout_wait_s=0.0,
        staleness_histogram={},
        trajectories=0,
        stale_trajectories=0,
        reused_tokens=0,
        dropped_tokens=0,
        evaluations=[],
    )
    return Cut(
        step=step,
        ledger=StalenessLedger(batch_size=1, max_staleness=0).snapshot(),
        cursor=0,
        groups=[],
        failed_attempts={},
        truncated=0,
        recorded=recorded,
        history=HistorySizes(events_bytes=0, metrics_bytes=0, journal_bytes=0),
    )


@contextmanager
def largest_file(pid: int, size_bytes: int) -> Iterator[None]:
    """Every write beyond that fails in the process, as on a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def test_disk_full_in_the_real_trainer_leaves_the_older_checkpoint_whole(tmp_path: Path) -> None:
    model = character_llama(tmp_path / "model", ALPHABET, hidden_size=32)
    trainer = LocalTrainer(model, learning_rate=1e-3)
    checkpoints = Checkpoints(tmp_path / "run", keep=1)

    async def main() -> None:
        await trainer.start(tmp_path)
        assert trainer._ranks is not None
        [child] = trainer._ranks._ranks
        assert isinstance(child, Child)
        try:
            await trainer.step(pair(0))
            await checkpoints.save(cut(1), trainer, [])
            await trainer.step(pair(1))
            # At once, and with some of the state written.
            for size_bytes in (4096, 100_000):
                with largest_file(child.pid, size_bytes), pytest.raises(TrainerError, match="could not write"):
                    await checkpoints.save(cut(2), trainer, [])
                assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]
                assert open_checkpoint(tmp_path / "run").cut.step == 1
            # Room again: nothing of the failed saves is in the way.
            await checkpoints.save(cut(2), trainer, [])
        finally:
            await trainer.stop()

    asyncio.run(main())
    saved = open_checkpoint(tmp_path / "run")
    assert saved.cut.step == 2
    again, expected = Learner(trainer.settings), Learner(trainer.settings)
    again.load_state(saved.trainer)
    for step in range(2):
        expected.step(pair(step))
    assert again.step(pair(2)).loss == pytest.approx(expected.step(pair(2)).loss, rel=1e-5)
