"""The demo's starting point: a small model that adds two-digit numbers, but only about a third of the time.

It is a character-level Llama of about a million parameters, trained here from nothing on worked additions
until it answers about a third of them when sampled at temperature 1. That leaves a slope for RL to climb.
The folder it is written to is an ordinary Hugging Face folder; this file knows nothing of staleflow.
"""

import hashlib
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

# Threads that spin while they wait make a step six times slower as soon as another process wants a core.
# OpenMP reads this once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = {token: index for index, token in enumerate([PAD, EOS, *"0123456789+="])}
PROMPT_TOKENS = 6  # "37+58="
ROW_TOKENS = 10  # the longest row is "99+99=198<eos>"


class Problem(msgspec.Struct, frozen=True):
    """One addition of two two-digit numbers."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """What the model is shown, ``37+58=``."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """What it should write before it stops, ``95``."""
        return str(self.a + self.b)


class Recipe(msgspec.Struct, frozen=True):
    """All that decides which model comes out. Its hash names the folder in the cache."""

    seed: int
    version: int = 1  # raise it when the code below changes what is trained
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 2
    heads: int = 6
    # Twice and a half the usual 0.02: with so few steps, a small start costs a third of the run.
    initializer_range: float = 0.05
    batch_rows: int = 256
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    validation_rows: int = 512
    target_accuracy: float = 1 / 3
    limit_s: float = 55.0  # of training; a minute with all else

    @property
    def folder(self) -> str:
        """The name of this recipe's folder in the cache."""
        return "warm-start-" + hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Progress(msgspec.Struct, frozen=True):
    """Where the training stands after a measurement."""

    step: int
    loss: float
    accuracy: float
    elapsed_s: float

    def __str__(self) -> str:
        return (
            f"warm start: step {self.step:4d}  loss {self.loss:.3f}  "
            f"accuracy {self.accuracy:.3f}  {self.elapsed_s:4.1f} s"
        )


def problems(seed: int, held_out: int = 512) -> tuple[list[Problem], list[Problem]]:
    """Split all two-digit additions into a train and a held-out list; the same seed gives the same lists."""
    every = [Problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(every)
    return every[held_out:], every[:held_out]


def warm_started_model(cache: Path, *, seed: int) -> Path:
    """Return a Hugging Face folder below `cache` with the warm-started model; train it if it is not there.

    Takes at most a minute. Should that not be enough, it warns with the accuracy reached and returns what
    there is, under a name that no later call takes for the finished model.
    """
    recipe = Recipe(seed=seed)
    finished = cache / recipe.folder
    if finished.is_dir():
        return finished
    cache.mkdir(parents=True, exist_ok=True)
    model = _new_model(recipe)
    last = _show(_train(model, recipe))
    written = Path(tempfile.mkdtemp(dir=cache, prefix=f"{recipe.folder}-unfinished-"))
    _write(model, written)
    if last.accuracy >= recipe.target_accuracy:
        return _finish(written, finished)
    warnings.warn(
        f"the warm start was stopped after {last.elapsed_s:.0f} s at an accuracy of {last.accuracy:.3f}, "
        f"short of {recipe.target_accuracy:.3f}; RL starts from a weaker model than intended",
        stacklevel=2,
    )
    return written


def _new_model(recipe: Recipe) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not ours to reset
        torch.manual_seed(recipe.seed)
        config = LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=64,
            initializer_range=recipe.initializer_range,
            tie_word_embeddings=True,
            pad_token_id=VOCABULARY[PAD],
            eos_token_id=VOCABULARY[EOS],
            bos_token_id=None,
            architectures=["LlamaForCausalLM"],
            dtype="float32",
        )
        return LlamaForCausalLM(config)


def _train(model: LlamaForCausalLM, recipe: Recipe) -> Iterator[Progress]:
    """Train until the accuracy is reached or the time is up; yield each measurement, that one last."""
    started = time.monotonic()
    train, _ = problems(recipe.seed)
    rows = _rows(train)
    # Never trained on, so that its accuracy foretells the held-out one.
    validation, rows = rows[: recipe.validation_rows], rows[recipe.validation_rows :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step, batch in enumerate(_batches(rows, recipe), start=1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, step / recipe.warmup_steps)
        logprobs = _answer_logprobs(model, batch)
        loss = -logprobs.sum() / (batch[:, PROMPT_TOKENS:] != VOCABULARY[PAD]).sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        time_is_up = time.monotonic() - started >= recipe.limit_s
        # Measuring costs most of a step: do it at each step only when the batch says the end is near.
        near = _sampled_accuracy(logprobs) >= 0.8 * recipe.target_accuracy
        if near or time_is_up or step % 10 == 0:
            with torch.no_grad():
                accuracy = _sampled_accuracy(_answer_logprobs(model, validation))
            yield Progress(step, loss.item(), accuracy, time.monotonic() - started)
            if time_is_up or accuracy >= recipe.target_accuracy:
                return


def _rows(examples: list[Problem]) -> torch.Tensor:
    """One padded row of token ids per example: prompt, answer, <eos>."""
    rows = [[*(VOCABULARY[c] for c in e.prompt + e.answer), VOCABULARY[EOS]] for e in examples]
    return torch.tensor([row + [VOCABULARY[PAD]] * (ROW_TOKENS - len(row)) for row in rows])


def _batches(rows: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Whole batches without end, each pass over the rows in a new order."""
    shuffler = torch.Generator().manual_seed(recipe.seed)
    while True:
        order = torch.randperm(len(rows), generator=shuffler)
        for start in range(0, len(rows) - recipe.batch_rows + 1, recipe.batch_rows):
            yield rows[order[start : start + recipe.batch_rows]]


def _answer_logprobs(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the answer tokens, <eos> with them; 0 at the padding. One row per example."""
    logits: torch.Tensor = model(input_ids=rows[:, :-1], use_cache=False).logits
    answers = rows[:, PROMPT_TOKENS:, None]
    logprobs = logits[:, PROMPT_TOKENS - 1 :].log_softmax(-1).gather(-1, answers)
    return logprobs.masked_fill(answers == VOCABULARY[PAD], 0.0).squeeze(-1)


def _sampled_accuracy(answer_logprobs: torch.Tensor) -> float:
    """The share of right answers to expect when sampling at temperature 1: exact, with nothing sampled."""
    return answer_logprobs.detach().sum(-1).exp().mean().item()


def _show(measurements: Iterator[Progress]) -> Progress:
    """Show the training while it runs, in place on a terminal and line by line elsewhere; return its end."""
    console = Console()
    with console.status("warm start") as status:
        for progress in measurements:
            status.update(str(progress))
            if not console.is_terminal and progress.step % 10 == 0:
                console.print(str(progress), highlight=False)
    console.print(str(progress), highlight=False)
    return progress


def _write(model: LlamaForCausalLM, folder: Path) -> None:
    """Write everything that a Hugging Face folder needs into `folder`."""
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied to the embedding, which safetensors refuses to write twice
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    ends = {"eos_token_id": VOCABULARY[EOS], "pad_token_id": VOCABULARY[PAD]}
    GenerationConfig.from_dict(ends).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _finish(written: Path, finished: Path) -> Path:
    """Give a complete folder its final name in one step, so that a half-written one is never found there."""
    try:
        written.rename(finished)
    except OSError:
        if not finished.is_dir():
            raise
        shutil.rmtree(written)  # another process was faster; its model is the same
    return finished


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a character outside the vocabulary is an error."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
