"""A model of 130,000 random weights learns to repeat the letter it is given."""

import tempfile

import staleflow
from staleflow.testing import character_llama

LETTERS = "abcdefgh"


async def rollout(letter: str, llm: staleflow.LLM) -> float:
    answer = await llm.generate(f"{letter}:", max_new_tokens=4)
    return answer.text.count(letter) / 4


if __name__ == "__main__":
    model = character_llama(tempfile.mkdtemp(), LETTERS + ":")
    pipeline = staleflow.Pipeline(
        tasks=staleflow.ListTasks(LETTERS),
        rollout=rollout,
        engines=[staleflow.EmbeddedEngine(model)],
        trainer=staleflow.LocalTrainer(model, learning_rate=3e-3),
        config=staleflow.Config(steps=100, batch_size=8, group_size=8, max_staleness=2),
        held_out=LETTERS * 16,
    )
    report = staleflow.run(pipeline)
    print(f"reward {report.accuracy_before:.2f} -> {report.accuracy_after:.2f}")
    print(f"staleness at most {report.staleness_max}; run folder {report.run_dir}")
