"""One of several ranks dies in a step: the step ends soon, with the error of that rank, and no process is left."""

import asyncio
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from models import ALPHABET, batch, figures

from staleflow import LocalTrainer
from staleflow.errors import TrainerError
from staleflow.testing import character_llama
from staleflow.trainer.learner import Learner

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

END_S = 30.0
"""Two to listen for earlier failures and five until a child that hangs is killed, on a busy machine."""
LOSS = "striking_loss:strike"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"(?s)^trainer-1 \(pid \d+\) was ended by SIGKILL"),
        (
            "raise while others hang",
            r"(?s)^trainer-1 could not train batch 1:.*  \| ArithmeticError: this rank cannot go on$",
        ),
    ],
    ids=["killed", "raised while another is blocked"],
)
def test_step_ends_with_the_error_of_the_rank_that_failed_first(
    tmp_path: Path, importable_children: None, how: str, message: str
) -> None:
    model = character_llama(tmp_path / "model", ALPHABET, hidden_size=32)
    trainer = LocalTrainer(model, ranks=2, loss=LOSS, loss_parameters={"how": how})
    expected = Learner(LocalTrainer(model, loss=LOSS, loss_parameters={"how": "never"}).settings).step(batch())

    async def main() -> float:
        await trainer.start(tmp_path)
        watching = asyncio.create_task(trainer.run())
        measured = await trainer.step(batch())
        assert figures(measured) == pytest.approx(figures(expected), rel=1e-4, abs=1e-6)
        (tmp_path / "published").mkdir()
        await trainer.publish(tmp_path / "published")
        assert len(list((tmp_path / "published").iterdir())) == 2

        struck_s = time.monotonic()
        with pytest.raises(TrainerError, match=message) as raised:
            await trainer.step(batch(1))
        took_s = time.monotonic() - struck_s
        with pytest.raises(TrainerError) as watched:
            await watching
        assert str(watched.value) == str(raised.value), "whoever watches says the same"
        with pytest.raises(TrainerError) as again:
            await trainer.publish(tmp_path)
        assert str(again.value) == str(raised.value), "and so does whoever asks for more"
        await trainer.stop()
        return took_s

    assert asyncio.run(main()) < END_S
    assert [child for child in psutil.Process().children() if "trainer.rank" in " ".join(child.cmdline())] == []
