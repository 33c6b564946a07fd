"""The parts of the example on a real pretrained model that need no model."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from smollm_sums import ChainSums, Sum, rewards_of

from staleflow import ResumableTaskSource
from staleflow.tasks import hand_out_again
from staleflow.types import Task


def tasks_of(source: ChainSums, count: int) -> list[Task[Sum]]:
    async def take() -> list[Task[Sum]]:
        return [await source.next() for _ in range(count)]

    return asyncio.run(take())


def again(source: ChainSums, tasks: Iterable[int], cursor: int) -> dict[int, Task[Sum]]:
    return asyncio.run(hand_out_again(source, tasks, cursor=cursor))


def test_sums_come_again_from_a_source_of_another_process() -> None:
    first = tasks_of(ChainSums(), 8)
    resumed = ChainSums()
    assert isinstance(resumed, ResumableTaskSource)
    assert again(resumed, [2, 5], cursor=6) == {2: first[2], 5: first[5]}
    assert tasks_of(resumed, 2) == first[6:]


def test_seed_decides_which_sums_there_are() -> None:
    first, same, other = ([task.data.prompt for task in tasks_of(ChainSums(seed=seed), 20)] for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_settings_bound_the_sums() -> None:
    entries = [task.data.entry["metadata"] for task in tasks_of(ChainSums(terms=3, digits=2), 200)]
    assert {entry["num_terms"] for entry in entries} == {2, 3}
    assert {entry["num_digits"] for entry in entries} == {1, 2}


def test_prompt_ends_where_the_answer_begins() -> None:
    [task] = tasks_of(ChainSums(), 1)
    worked = task.data.prompt.splitlines()
    assert worked[-1] == f"{task.data.entry['metadata']['expression']} ="
    assert len(worked) > 1


SUM = Sum({"answer": "12", "metadata": {"expression": "7 + 5", "difficulty": {}}, "question": "7 + 5 ="})


@pytest.mark.parametrize(
    ("answer", "earned"),
    [
        ("12", 1.0),
        (" 12\n", 1.0),
        ("+12.0", 1.0),
        ("12 apples", 2 / 9),
        ("the sum is 12", 2 / 13),
        ("13", 0.0),
        ("-12 or so", 2 / 9),
        ("1 2", 0.0),
        ("nan", 0.0),
        ("twelve", 0.0),
        ("", 0.0),
        (" ", 0.0),
    ],
)
def test_answer_earns_what_the_scorer_gives_for_all_of_it(answer: str, earned: float) -> None:
    assert ChainSums().score(answer, SUM) == pytest.approx(earned)


def test_rewards_are_read_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"reward_mean":0.25}\n{"step":1,"reward_mean":0.5}\n')
    assert rewards_of(tmp_path) == [0.25, 0.5]
