"""Engines, tokenizer and trainer of different models are found out before anything is sampled."""

from typing import Any

import pytest
from support import Scripted
from tokenizers import Tokenizer, models

from staleflow import Config
from staleflow.errors import ConfigError
from staleflow.events import Requested
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import ModelLimits

CONFIG = Config(steps=1, batch_size=1, group_size=1)


def words(*ids: int) -> Tokenizer:
    return Tokenizer(models.WordLevel({f"word{index}": index for index in ids}, unk_token=f"word{ids[0]}"))


@pytest.mark.parametrize(
    ("engines", "limits", "message"),
    [
        (
            [{"vocabulary": 16}, {"vocabulary": 14}],
            ModelLimits(vocabulary=16),
            "engine 1 has a vocabulary of 14 token ids and the trainer one of 16: .* must load the same model",
        ),
        (
            [{"vocabulary": 16}],
            ModelLimits(vocabulary=14),
            "engine 0 has a vocabulary of 16 token ids and the trainer one of 14",
        ),
        (
            [{}, {"vocabulary": 16}, {"vocabulary": 14}],
            ModelLimits(),
            "engine 2 has a vocabulary of 14 token ids and engine 1 one of 16",
        ),
        (
            [{"vocabulary": 14, "tokenizer": words(0, 14)}],
            ModelLimits(),
            "the tokenizer of engine 0 has token id 14, and its model a vocabulary of 14: .*tokenizer.json",
        ),
        (
            [{}],
            ModelLimits(max_tokens=4095),
            "engine 0 serves sequences of up to 4096 tokens, and the trainer's model takes at most 4095",
        ),
    ],
)
def test_different_models_are_named_before_anything_is_sampled(
    scripted: Scripted, engines: list[dict[str, Any]], limits: ModelLimits, message: str
) -> None:
    run = scripted(CONFIG, engines=[ScriptedEngine(**each) for each in engines], trainer=ScriptedTrainer(limits=limits))
    with pytest.raises(ConfigError, match=message):
        raise run.fail(ConfigError)
    assert run.events_of(Requested) == []
    assert run.trainer.batches == []


@pytest.mark.parametrize(
    ("engines", "limits"),
    [
        ([{"vocabulary": 16, "tokenizer": words(0, 13)}, {}], ModelLimits(16, 4096)),
        ([{"vocabulary": 16}, {"vocabulary": 16}], ModelLimits()),
        ([{"tokenizer": words(0, 99)}], ModelLimits(16)),
    ],
)
def test_vocabulary_that_is_padded_or_not_reported_is_no_mismatch(
    scripted: Scripted, engines: list[dict[str, Any]], limits: ModelLimits
) -> None:
    run = scripted(CONFIG, engines=[ScriptedEngine(**each) for each in engines], trainer=ScriptedTrainer(limits=limits))
    assert run.run().steps == 1


def test_reply_with_a_foreign_token_fails_its_trajectory(scripted: Scripted) -> None:
    engine = ScriptedEngine(lambda request, rng: [16 if request.request_id == "1.0.0.0" else 3], vocabulary=16)
    run = scripted(CONFIG, engines=[engine])
    report = run.run()
    assert report.accounting.failed_attempts == {"EngineReplyError": 1}
    assert [one.token_ids[-1] for one in run.trainer.batches[0].trajectories] == [3]
