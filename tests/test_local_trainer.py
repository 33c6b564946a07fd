"""The local trainer with a real child: the wire around the learner."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from models import ALPHABET, figures, load, pair

from staleflow import LocalTrainer
from staleflow.errors import TrainerError
from staleflow.testing import character_llama
from staleflow.trainer.learner import Learner

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_llama(tmp_path_factory.mktemp("model"), ALPHABET, hidden_size=32)


def test_trains_publishes_and_saves_over_the_wire(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = LocalTrainer(model, learning_rate=1e-3)

    async def main() -> None:
        await trainer.start(tmp_path)
        running = asyncio.create_task(trainer.run())
        first = await trainer.step(pair(0))

        # The answer to a call that was cancelled is not taken for that to the next one.
        cancelled = asyncio.create_task(trainer.step(pair(1)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        await trainer.publish(published)
        third = await trainer.step(pair(2))

        with pytest.raises(TrainerError, match=r"could not write .*missing"):
            await trainer.publish(tmp_path / "missing")
        (tmp_path / "file").touch()
        with pytest.raises(TrainerError, match="could not write"):
            await trainer.save(tmp_path / "file" / "checkpoint")
        await trainer.save(tmp_path / "checkpoint")
        assert not running.done()
        running.cancel()
        await trainer.stop()
        await trainer.stop()
        for measured, wanted in ((first, expected[0]), (third, expected[2])):
            assert figures(measured) == pytest.approx(figures(wanted), rel=1e-4, abs=1e-6)

    published, expected_folder = tmp_path / "published", tmp_path / "expected"
    published.mkdir()
    expected_folder.mkdir()
    learner = Learner(trainer.settings)
    expected = []
    for step in range(3):
        if step == 2:
            learner.write_weights(expected_folder)
        expected.append(learner.step(pair(step)))
    asyncio.run(main())
    # The cancelled step is part of both: the child had it already.
    written, computed = (load_file(folder / "weights-0.safetensors") for folder in (published, expected_folder))
    torch.testing.assert_close(written, computed, rtol=1e-4, atol=1e-5)
    saved = dict(load(tmp_path / "checkpoint").named_parameters())
    torch.testing.assert_close(saved, dict(learner._model.named_parameters()), rtol=1e-4, atol=1e-5)


def test_calls_before_the_start_are_refused(model: Path) -> None:
    with pytest.raises(TrainerError, match="not started"):
        asyncio.run(LocalTrainer(model).step(pair(0)))


OWN_LOSS = """
from staleflow.trainer.losses import TokenLoss, Tokens

def likelihood(policy_logprobs, tokens: Tokens, *, scale: float) -> TokenLoss:
    return TokenLoss(-scale * tokens.advantages * policy_logprobs, policy_logprobs > 0)
"""


def test_own_loss_reaches_the_child(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module lies in a folder that only this process knows of."""
    (tmp_path / "own_loss_module.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = LocalTrainer(model, loss="own_loss_module:likelihood", loss_parameters={"scale": 0.5})

    async def main() -> None:
        await trainer.start(tmp_path)
        measured = await trainer.step(pair(0))
        await trainer.stop()
        assert figures(measured) == pytest.approx(figures(expected), rel=1e-4, abs=1e-6)

    expected = Learner(trainer.settings).step(pair(0))
    assert expected.gradient_norm > 0
    asyncio.run(main())


def test_own_loss_that_does_not_exist_ends_the_start_with_its_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_empty_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    trainer = LocalTrainer(model, loss="own_empty_module:absent")

    async def main() -> None:
        try:
            with pytest.raises(TrainerError, match="'own_empty_module' has no attribute 'absent'"):
                await trainer.start(tmp_path)
        finally:
            await trainer.stop()

    asyncio.run(main())
