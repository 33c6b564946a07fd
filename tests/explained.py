"""Runs to be explained, and what must be true of every explanation."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from support import Scripted, ScriptedRun

from staleflow import LLM, Config, ListTasks
from staleflow.events import Answered, Dropped, Interrupted, PhaseBegan, Routed
from staleflow.explain import Cause, Explanation, TrainerWait, Waiting, explain, read_run
from staleflow.testing import ScriptedEngine, ScriptedTrainer
from staleflow.types import GenerateRequest, Generation, Task

MILLISECOND = 0.001


class TimedEngine(ScriptedEngine):
    """Answers every request with one token after a time that the test chooses by the request's id."""

    def __init__(self, seconds: Callable[[str], float] = lambda _: 1.0, **options: Any) -> None:
        super().__init__(**{"update_s": 0.0, **options})
        self._seconds = seconds

    async def generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(self._seconds(request.request_id))
        return Generation(request.request_id, [1], [-1.0], [self.version], "stop")


class SlowTasks:
    """Every task is at hand only after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._tasks = ListTasks(range(100), seed=None)
        self._seconds = seconds

    async def next(self) -> Task[int] | None:
        await asyncio.sleep(self._seconds)
        return await self._tasks.next()


def trainer(step_s: float) -> ScriptedTrainer:
    return ScriptedTrainer(step_s=step_s, publish_s=0.0)


def slow_reward(seconds: float) -> Callable[[int, LLM], Any]:
    async def rollout(task: int, llm: LLM) -> float:
        await llm.generate([1], max_new_tokens=1)
        await asyncio.sleep(seconds)
        return float(task % 2)

    return rollout


def explained(run: ScriptedRun) -> Explanation:
    """Run and explain; checks that all sums are those that the run measured itself."""
    run.run()
    found = explain(read_run(run.run_dir))
    check_sums(run, found)
    return found


def check_sums(run: ScriptedRun, found: Explanation) -> None:
    lines = (run.run_dir / "metrics.jsonl").read_bytes().splitlines()
    measured = {record["step"]: record for record in map(json.loads, lines)}
    by_batch = {wait.batch: wait for wait in found.waits}
    for step, record in measured.items():
        waited_s = by_batch[step].waited_s if step in by_batch else 0.0
        assert waited_s == pytest.approx(record["trainer_wait_s"], abs=MILLISECOND)
    parts: list[Waiting | TrainerWait] = [found.trainer, *found.engines, *found.waits]
    for waiting in parts:
        assert sum(waiting.seconds.values()) == pytest.approx(waiting.waited_s, abs=1e-9)
        assert all(seconds > 0 for seconds in waiting.seconds.values())
    assert found.trainer.waited_s == pytest.approx(sum(wait.waited_s for wait in found.waits), abs=1e-9)
    for engine, idle in enumerate(found.engines):
        assert idle.waited_s == pytest.approx(idle_s(run, engine, found), abs=MILLISECOND)
    if len(found.engines) == 1 and found.published == found.steps:
        rollout_wait_s = sum(record["rollout_wait_s"] for record in measured.values())
        assert found.engines[0].waited_s == pytest.approx(rollout_wait_s, abs=MILLISECOND)


def idle_s(run: ScriptedRun, engine: int, found: Explanation) -> float:
    """Seconds of training without a request on the engine, from the log alone."""
    events = run.events()
    begin_s = next(event.t for event in events if isinstance(event, PhaseBegan) and event.phase == "training")
    end_s = begin_s + found.training_s
    ended = {event.request: event.t for event in events if isinstance(event, Answered | Interrupted | Dropped)}
    busy = sorted(
        (max(event.t, begin_s), min(ended[event.request], end_s))
        for event in events
        if isinstance(event, Routed) and event.engine == engine
    )
    idle, free_from_s = 0.0, begin_s
    for start_s, stop_s in busy:
        idle += max(0.0, min(start_s, end_s) - free_from_s)
        free_from_s = max(free_from_s, stop_s)
    return idle + max(0.0, end_s - free_from_s)


def near(seconds: dict[Cause, float]) -> Any:
    return pytest.approx(seconds, abs=1e-5)


def straggler(scripted: Scripted) -> ScriptedRun:
    """Member 3 of the first group takes 10 seconds, on engine 1; all else takes one."""
    engines = [TimedEngine(lambda request: 10.0 if request.startswith("1.3.") else 1.0) for _ in range(2)]
    config = Config(steps=2, batch_size=1, group_size=4, max_staleness=0)
    return scripted(config, engines=engines, trainer=trainer(2.0))


RANDOM = Config(steps=8, batch_size=3, group_size=3, max_staleness=2, max_attempts=2, evaluate_every_steps=3)


async def turbulent(task: int, llm: LLM) -> float:
    """Several turns, an environment that takes its time, and failures."""
    rng = random.Random(task)
    for _ in range(rng.randint(1, 3)):
        completion = await llm.generate([task % 10], max_new_tokens=6)
        await asyncio.sleep(rng.expovariate(5.0))
    if rng.random() < 0.2:
        raise RuntimeError("the environment broke")
    return float(sum(completion.token_ids) % 2)
