"""What the controller costs per trajectory, beside the least that asyncio could cost for the same waiting.

Both sides run on the virtual clock, so nobody really waits and only their own work is measured: the pipeline with
scripted parts, against one bare asyncio task per trajectory that sleeps for the same tokens.
"""

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from time import perf_counter_ns

import staleflow
from staleflow.bench.plan import Plan
from staleflow.bench.result import Figure
from staleflow.bench.turns import Sample, in_turns
from staleflow.testing import ScriptedEngine, ScriptedTrainer, run_virtually

BATCH_SIZE, GROUP_SIZE, TOKENS = 32, 8, 8


def measure(plan: Plan) -> Iterator[list[Figure]]:
    """Whole runs of the pipeline, and of bare tasks."""
    contestants = {"pipeline": _timed(_pipeline, plan.steps), "bare tasks": _timed(_bare_tasks, plan.steps)}
    yield [
        Figure(
            part="pipeline",
            work="trajectory",
            step=step,
            contestant=contestant,
            setting={"batch_size": BATCH_SIZE, "group_size": GROUP_SIZE, "tokens": TOKENS, "steps": plan.steps},
            unit="ns",
            samples=samples,
        )
        for (contestant, step), samples in in_turns(contestants, plan.samples).items()
    ]


def _timed(work: Callable[[int], None], steps: int) -> Sample:
    def sample() -> dict[str, float]:
        started = perf_counter_ns()
        work(steps)
        return {"life": (perf_counter_ns() - started) / (steps * BATCH_SIZE * GROUP_SIZE)}

    return sample


async def _rollout(task: int, llm: staleflow.LLM) -> float:
    answer = await llm.generate([task], max_new_tokens=TOKENS)
    return float(answer.token_ids[0])


def _pipeline(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_virtually(
            staleflow.Pipeline(
                tasks=staleflow.ListTasks(range(1000)),
                rollout=_rollout,
                engines=[ScriptedEngine(lambda request, rng: [1] * TOKENS, capacity=256)],
                trainer=ScriptedTrainer(),
                config=staleflow.Config(steps=steps, batch_size=BATCH_SIZE, group_size=GROUP_SIZE),
                run_dir=f"{folder}/run",
                progress=False,
            ).run()
        )


def _bare_tasks(steps: int) -> None:
    async def trajectory(rng: random.Random) -> None:
        for _ in range(TOKENS):
            await asyncio.sleep(rng.expovariate(100))

    async def main() -> None:
        for _ in range(steps):
            async with asyncio.TaskGroup() as scope:
                for index in range(BATCH_SIZE * GROUP_SIZE):
                    scope.create_task(trajectory(random.Random(f"{index}")))

    run_virtually(main())
