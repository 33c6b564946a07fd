"""Trainer and engines at equal weights: what is rounding, and what is a cause to name."""

import logging
import re
from typing import Any

import msgspec
import pytest
from support import Scripted

from staleflow import Config
from staleflow.testing import ScriptedTrainer
from staleflow.trainer.agreement import disagreement
from staleflow.types import Agreement, StepMetrics, TrainBatch

GOOD = Agreement(1000, ratio_mean=1.0, gap_mean=0.0, gap_rms=0.01, slope=1.0, residual_rms=0.01, correlation=1.0)


def test_rounding_is_no_disagreement() -> None:
    assert disagreement(GOOD) is None


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"slope": 0.8, "residual_rms": 0.02}, r"temperature: the engines' logprobs look like those at 0\.80 times"),
        ({"slope": 1.3, "residual_rms": 0.02, "gap_mean": -0.19}, "temperature: .* at 1.30 times"),
        ({"gap_mean": -0.19, "residual_rms": 0.01}, "logprob mode: nearly all gaps have one sign"),
        ({"gap_mean": 0.19, "residual_rms": 0.01}, "logprob mode: nearly all gaps have one sign"),
        ({"residual_rms": 0.2}, "dtype or kernels"),
        ({"slope": 0.9, "residual_rms": 0.19}, "dtype or kernels"),
        ({"correlation": 0.1, "slope": 0.1, "residual_rms": 0.05}, "another model or tokenizer"),
        ({"tokens": 3}, "too few tokens to tell"),
    ],
)
def test_cause_follows_from_the_shape_of_the_gaps(figures: dict[str, Any], cause: str) -> None:
    warning = disagreement(msgspec.structs.replace(GOOD, gap_rms=0.2, **figures))
    assert warning is not None
    assert re.search(f"Likely cause: {cause}", warning)


class Measures(ScriptedTrainer):
    """A scripted trainer that says how logprobs agree, step by step."""

    def __init__(self, *agreements: Agreement | None) -> None:
        super().__init__()
        self._agreements = iter(agreements)

    async def step(self, batch: TrainBatch) -> StepMetrics:
        return msgspec.structs.replace(await super().step(batch), agreement=next(self._agreements))


BAD = msgspec.structs.replace(GOOD, gap_rms=0.2, residual_rms=0.2)


@pytest.mark.parametrize(
    ("agreements", "warnings"), [((None, BAD, BAD), 1), ((GOOD, BAD, BAD), 0), ((None, None, None), 0)]
)
def test_run_is_warned_once_at_the_first_batch_that_can_tell(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, agreements: tuple[Agreement | None, ...], warnings: int
) -> None:
    config = Config(steps=3, batch_size=2, group_size=2, max_staleness=1)
    with caplog.at_level(logging.WARNING, "staleflow"):
        scripted(config, trainer=Measures(*agreements)).run()
    assert sum("trainer and engines disagree" in message for message in caplog.messages) == warnings
