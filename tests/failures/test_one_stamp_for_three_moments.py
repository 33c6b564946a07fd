"""A trajectory is admitted, sampled from and finished at three moments and maybe three versions; all are kept apart."""

import asyncio

from support import Scripted

from staleflow import LLM, Config
from staleflow.events import Admitted, Answered, Evaluated, EvaluationBegan, Finished, Published
from staleflow.testing import ScriptedEngine


async def waits_then_works(task: int, llm: LLM) -> float:
    """Time before the first token, and after the last one."""
    await asyncio.sleep(0.5)
    await llm.generate([1], max_new_tokens=8)
    await llm.generate([2], max_new_tokens=8)
    await asyncio.sleep(0.5)
    return float(task % 2)


def test_V10_admission_first_token_and_end_have_a_stamp_each(scripted: Scripted) -> None:
    config = Config(steps=6, batch_size=2, group_size=2, max_staleness=2)
    run = scripted(config, rollout=waits_then_works, engines=[ScriptedEngine(capacity=2)])
    run.run()
    admitted = {event.group: event for event in run.events_of(Admitted)}
    first = {event.request: event.t for event in run.events_of(Answered)}
    finished = {(event.group, event.member): event for event in run.events_of(Finished)}
    started_s = run.pipeline._recorder.started_s
    for one in (one for batch in run.trainer.batches for one in batch.trajectories):
        assert one.first_segment_s is not None
        assert one.finished_s is not None
        assert one.admitted_s - started_s == admitted[one.group].t
        assert one.first_segment_s - started_s == first[f"{one.group}.{one.member}.{one.attempt}.0"]
        assert one.finished_s - started_s == finished[one.group, one.member].t
        assert one.admitted_s + 0.5 <= one.first_segment_s <= one.finished_s - 0.5


def test_V10_a_prompt_that_queues_is_of_the_version_that_samples_it(scripted: Scripted) -> None:
    """It was admitted on older weights; as far as tokens go it is fresh, and its deadline moves accordingly."""
    config = Config(steps=8, batch_size=2, group_size=2, max_staleness=4)
    run = scripted(config, rollout=waits_then_works, engines=[ScriptedEngine(capacity=4, update_s=0.0)])
    run.run()
    admitted = {event.group: event.version for event in run.events_of(Admitted)}
    trained = [(batch.step, one) for batch in run.trainer.batches for one in batch.trajectories]
    assert any(min(one.versions) > admitted[one.group] for _, one in trained)
    for step, one in trained:
        assert admitted[one.group] <= min(one.versions)
        assert step - min(one.versions) <= config.max_staleness


def test_V10_an_accuracy_names_the_version_that_earned_it(scripted: Scripted) -> None:
    """Not the step at which it was asked for, nor the one at which it was known."""

    async def rollout(task: int, llm: LLM) -> float:
        await waits_then_works(task, llm)
        await asyncio.sleep(2.0 if task < 0 else 0.0)
        return min(llm._trajectory.versions)

    config = Config(steps=30, batch_size=1, group_size=2, max_staleness=2, evaluate_every_steps=5)
    engines = [ScriptedEngine(update_s=0.3) for _ in range(2)]
    run = scripted(config, rollout=rollout, held_out=[-1, -2, -3], engines=engines)
    run.run()
    published = 0
    late = 0
    for event in run.events():
        match event:
            case Published(version=version):
                published = version
            case Evaluated(step=step, reward=reward, versions=versions):
                assert reward == step
                assert versions == (step, step)
                late += step < published
    assert late > 0, "no evaluation was known later than its version"
    assert {event.version for event in run.events_of(EvaluationBegan)} == {e.step for e in run.events_of(Evaluated)}
