"""What the controller costs per trajectory, beside the least that asyncio could cost for the same waiting.

Both sides run on the virtual clock, so nothing but their own processor time is measured: the pipeline with scripted
parts, against one bare asyncio task per trajectory that sleeps for the same tokens. And what the ledger costs per
group, beside the same bookkeeping of counts in a Python dictionary, which checks no law.
"""

import asyncio
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

import staleflow
from staleflow.testing import ScriptedEngine, ScriptedTrainer, run_virtually

STEPS, BATCH_SIZE, GROUP_SIZE, TOKENS = 20, 32, 8, 8
GROUPS = 20_000
REPEATS = 5


async def rollout(task: int, llm: staleflow.LLM) -> float:
    answer = await llm.generate([task], max_new_tokens=TOKENS)
    return float(answer.token_ids[0])


def pipeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_virtually(
            staleflow.Pipeline(
                tasks=staleflow.ListTasks(range(1000)),
                rollout=rollout,
                engines=[ScriptedEngine(lambda request, rng: [1] * TOKENS, capacity=256)],
                trainer=ScriptedTrainer(),
                config=staleflow.Config(steps=STEPS, batch_size=BATCH_SIZE, group_size=GROUP_SIZE),
                run_dir=f"{folder}/run",
                progress=False,
            ).run()
        )


def bare_tasks() -> None:
    async def trajectory(rng: random.Random) -> None:
        for _ in range(TOKENS):
            await asyncio.sleep(rng.expovariate(100))

    async def main() -> None:
        for _ in range(STEPS):
            async with asyncio.TaskGroup() as scope:
                for index in range(BATCH_SIZE * GROUP_SIZE):
                    scope.create_task(trajectory(random.Random(f"{index}")))

    run_virtually(main())


def ledger() -> None:
    ledger = staleflow.StalenessLedger(batch_size=64, max_staleness=4)
    for _ in range(GROUPS // 64):
        for _ in range(64):
            ledger.complete(ledger.admit(ledger.published))  # type: ignore[arg-type]
        ledger.consume()
        ledger.publish(ledger.next_batch)


def dictionary() -> None:
    state: dict[int, str] = {}
    counts = {"running": 0, "complete": 0, "trained": 0}
    for batch in range(GROUPS // 64):
        for group in range(batch * 64, batch * 64 + 64):
            state[group] = "running"
            counts["running"] += 1
            state[group] = "complete"
            counts["running"] -= 1
            counts["complete"] += 1
        for group in range(batch * 64, batch * 64 + 64):
            del state[group]
            counts["complete"] -= 1
            counts["trained"] += 1


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    table = Table(title=f"{platform.machine()}, Python {platform.python_version()}, medians of {REPEATS}")
    for column in ("", "staleflow", "baseline", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    comparisons = (
        ("trajectory, whole life", pipeline, bare_tasks, STEPS * BATCH_SIZE * GROUP_SIZE),
        ("group in the ledger", ledger, dictionary, GROUPS // 64 * 64),
    )
    for name, measured, baseline, items in comparisons:
        # Alternating, so that a disturbance of the machine falls on both.
        pairs = [(seconds(measured), seconds(baseline)) for _ in range(REPEATS)]
        ours, theirs = (statistics.median(column) / items * 1e6 for column in zip(*pairs, strict=True))
        table.add_row(name, f"{ours:.1f} µs", f"{theirs:.1f} µs", f"{ours / theirs:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
