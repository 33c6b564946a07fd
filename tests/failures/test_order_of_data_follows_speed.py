"""What is trained first must not be what was finished first: that would put short answers in front."""

import asyncio
import itertools
import random

import pytest
from support import Replay, Scripted

from staleflow import LLM, Config, StalenessLedger
from staleflow.events import Completed, Consumed
from staleflow.testing import ScriptedEngine


@pytest.mark.parametrize("order", list(itertools.permutations(range(1, 5))))
def test_B6_batch_is_in_order_of_admission_whatever_was_complete_first(order: tuple[int, ...]) -> None:
    ledger = StalenessLedger(batch_size=2, max_staleness=1)
    assert ledger.admit_many(0, 4) == [1, 2, 3, 4]
    for group in order:
        ledger.complete(group)
    assert ledger.consume().groups == (1, 2)
    ledger.publish(1)
    assert ledger.consume().groups == (3, 4)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3, 7))))
def test_B6_what_is_due_earlier_is_trained_earlier(order: tuple[int, ...]) -> None:
    """Groups 3 and 4 turn out to be of version 1, so they are due later than those admitted after them."""
    ledger = StalenessLedger(batch_size=2, max_staleness=2)
    ledger.complete_many(ledger.admit_many(0, 6)[:2])
    ledger.consume()
    ledger.publish(1)
    for group in order:
        ledger.complete(group, min_version=1 if group in (3, 4) else 0)
    assert ledger.consume().groups == (5, 6)
    ledger.publish(2)
    assert ledger.consume().groups == (3, 4)


@pytest.mark.parametrize("seed", range(6))
def test_B6_every_batch_is_in_order_of_deadline_then_admission(scripted: Scripted, seed: int) -> None:
    rng = random.Random(seed)

    async def rollout(task: int, llm: LLM) -> float:
        await llm.generate([task % 10], max_new_tokens=8)
        await asyncio.sleep(rng.expovariate(1.0))
        return float(task % 2)

    config = Config(steps=20, batch_size=4, group_size=2, max_staleness=rng.choice([1, 3]))
    run = scripted(config, rollout=rollout, engines=[ScriptedEngine(seed=seed), ScriptedEngine(seed=seed + 100)])
    run.run()
    replay, complete, overtaken = Replay(config), list[int](), 0
    for event in run.events():
        if isinstance(event, Consumed):
            ranked = sorted(complete, key=lambda group: (replay.version[group], group))
            assert list(event.groups) == ranked[: config.batch_size]
            overtaken += complete[: config.batch_size] != ranked[: config.batch_size]
            complete = [group for group in complete if group not in event.groups]
        replay.apply(event)
        if isinstance(event, Completed):
            complete.append(event.group)
    assert overtaken > 0, "speed and order never differed, so nothing was shown"
