"""Engines die, come back, let go, fail updates and lie low, in any mode and on any schedule: all laws hold.

Every run is checked twice: while it ends, against the protocol in its plainest form (``support.Replay``), and here for
what a rollout was told, token by token.
"""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from explained import check_sums
from support import Scripted
from turbulence import Mortal, Restless, told

from staleflow import LLM, Config, StragglerPolicy
from staleflow.events import (
    Answered,
    Dropped,
    EngineDied,
    EngineRestarted,
    Event,
    Interrupted,
    Requested,
    Routed,
    Synced,
)
from staleflow.explain import explain, read_run
from staleflow.testing import ScriptedTrainer


def config_of(rng: random.Random) -> Config:
    stragglers = StragglerPolicy(action="truncate", patience_s=20.0) if rng.random() < 0.3 else None
    return Config(
        steps=8,
        batch_size=rng.randint(1, 3),
        group_size=rng.randint(1, 3),
        max_staleness=rng.randint(0, 3),
        extra_members=rng.randint(0, 1),
        stragglers=stragglers,
        engine_restarts=100_000,
        drain_timeout_s=rng.choice([0.1, 2.0]),
        evaluate_every_steps=rng.choice([None, 3]),
        # Engines that are dead half of the time must not fail a rollout.
        rollout_timeout_s=60.0,
    )


@pytest.mark.parametrize("seed", range(24))
def test_staleness_bound_holds_exactly_once_and_the_run_ends(scripted: Scripted, seed: int) -> None:
    rng = random.Random(seed)
    config = config_of(rng)

    async def rollout(task: int, llm: LLM) -> float:
        text: list[int] = []
        for _ in range(1 + task % 3):
            injected = [1 + task % 9, 2]
            text += injected
            answer = await llm.generate(injected, max_new_tokens=12)
            if answer.finish_reason == "truncated":
                return 0.0
            assert answer.token_ids == told(text, 12)
            text += answer.token_ids
        return float(sum(text) % 5)

    run = scripted(
        config,
        rollout=rollout,
        engines=[Mortal(31 * seed + index, mean_life_s=rng.choice([1.5, 6.0])) for index in range(rng.randint(1, 4))],
        trainer=ScriptedTrainer(step_s=rng.choice([0.05, 0.5])),
        held_out=range(4),
        coordinator=Restless(seed),
    )
    report = run.run()
    assert report.steps == config.steps
    assert set(report.accounting.failed_attempts) <= {"RolloutError"}, "only those truncated before their first token"
    assert report.held_out_failures == 0
    events = run.events()
    ended = Counter(event.request for event in events if isinstance(event, Answered | Interrupted | Dropped))
    assert all(count == 1 for count in ended.values())
    assert ended.keys() <= {event.request for event in events if isinstance(event, Requested)}
    check_nothing_is_routed_to_the_dead(run.events_of(EngineDied), events)
    check_sums(run, explain(read_run(run.run_dir)))


def check_nothing_is_routed_to_the_dead(deaths: list[EngineDied], events: Sequence[Event]) -> None:
    """Between an engine's death and its next confirmed version it has no request."""
    published = 0
    serves: dict[int, bool] = {}
    for event in events:
        match event:
            case EngineDied(engine=engine):
                serves[engine] = False
            case EngineRestarted(engine=engine):
                serves[engine] = published == 0
            case Synced(engine=engine, version=version):
                serves[engine] = True
                published = max(published, version)
            case Routed(engine=engine):
                assert serves.get(engine, True)


def test_same_seed_same_event_log(scripted: Scripted) -> None:
    def log() -> bytes:
        run = scripted(
            Config(steps=6, batch_size=2, group_size=2, engine_restarts=1000),
            engines=[Mortal(seed, mean_life_s=2.0) for seed in (1, 2)],
            coordinator=Restless(3),
        )
        run.run()
        return (run.run_dir / "events.jsonl").read_bytes()

    assert log() == log()
