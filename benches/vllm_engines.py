"""What staleflow costs beside a real vLLM server: tokens per second, weight updates, large replies.

``make bench-vllm``. Everything is measured beside its baseline, in turns, in the same run:

- **Tokens per second** of a pipeline against a closed loop: so many workers that send the same requests straight to the
  same server, one after another.
- **Weight updates** of a model of SmolLM2's size while it generates: how long the server pauses, what that costs in
  tokens, how fast weights are pulled, against the rate at which this machine copies memory.
- **Large replies** (``staleflow.bench.replies``): how late the event loop is while they arrive.
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import aiohttp
import numpy as np

import staleflow
from staleflow.bench import replies
from staleflow.bench.result import commit, this_machine, today
from staleflow.coordinator import Command, LeastLoad, Snapshot, Sync
from staleflow.engines.vllm_api import Prefetch, VllmApi
from staleflow.engines.vllm_carriers import Pull
from staleflow.engines.vllm_requests import VllmRequests
from staleflow.engines.vllm_update import WeightUpdates
from staleflow.runner import loop_factory
from staleflow.testing import ScriptedTrainer
from staleflow.types import GenerateRequest

OUT = Path(__file__).with_suffix(".md")
PARTS = ("tokens", "updates", "replies")
PROMPT = [3, 4, 5]
GROUP_SIZE = 8
BATCHES = 4
SECRET = "a secret of the benchmark"
WATCHED_S = 2.0
"""How long generation is watched to know its rate between updates."""
ENDLESS_TOKENS = 2_000


class Size(NamedTuple):
    """A Llama with random weights, which never ends a text by itself."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.hidden}"

    def save(self, folder: Path) -> Path:
        """Make it."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        return folder


TINY = Size(layers=2, hidden=64, intermediate=256, heads=2, key_value_heads=2, vocabulary=256)
SMOLLM = Size(layers=30, hidden=576, intermediate=1536, heads=9, key_value_heads=3, vocabulary=49_152)


class Load(NamedTuple):
    """Requests to a model, ``concurrency`` at a time. Eight at a time ask for as many tokens, as members of a group."""

    size: Size
    requests: int
    concurrency: int
    shortest: int
    longest: int

    @property
    def lengths(self) -> list[int]:
        """Tokens that each group asks for."""
        rng = random.Random(1)
        return [rng.randint(self.shortest, self.longest) for _ in range(self.requests // GROUP_SIZE)]


LOADS = (
    Load(TINY, requests=512, concurrency=32, shortest=32, longest=224),
    Load(SMOLLM, requests=64, concurrency=16, shortest=8, longest=56),
)


@asynccontextmanager
async def serving(size: Size) -> AsyncIterator[tuple[str, Path]]:
    """A server of a new model; yields its URL and the model's folder."""
    with tempfile.TemporaryDirectory() as folder:
        model = size.save(Path(folder) / "model")
        server = staleflow.VllmServer(model, secret=SECRET, arguments=["--skip-tokenizer-init"])
        try:
            yield await server.start("server", Path(folder)), model
        finally:
            await server.stop()


# -- tokens per second ---------------------------------------------------------------------------------------------


class NeverSyncs:
    """As :class:`LeastLoad`, but all is generated with the initial weights, as in a closed loop."""

    def __init__(self) -> None:
        self._least_load = LeastLoad()

    def decide(self, snapshot: Snapshot) -> list[Command]:
        """See :class:`staleflow.coordinator.Coordinator`."""
        return [command for command in self._least_load.decide(snapshot) if not isinstance(command, Sync)]


async def closed_loop(url: str, model: Path, lengths: Sequence[int], concurrency: int) -> float:
    """Tokens per second of so many workers, each of which sends a request when its last one is answered."""
    waiting = list(enumerate(lengths))[::-1]
    began_s = perf_counter()

    async def work(session: aiohttp.ClientSession) -> None:
        while waiting:
            number, length = waiting.pop()
            body = {
                "request_id": f"closed-{began_s}-{number}",
                "model": str(model),
                "token_ids": PROMPT,
                "sampling_params": {"max_tokens": length, "temperature": 1.0, "logprobs": 0, "detokenize": False},
            }
            async with session.post(url + "/inference/v1/generate", json=body) as response:
                choice = (await response.json())["choices"][0]
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == length

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work(session))
    return sum(lengths) / (perf_counter() - began_s)


async def through_pipeline(url: str, model: Path, lengths: Sequence[int], concurrency: int, group_size: int) -> float:
    """Tokens per second from the first call in a rollout to the return of the last; each length is of a group."""
    times: list[float] = []

    async def rollout(length: int, llm: staleflow.LLM) -> float:
        times.append(perf_counter())
        answer = await llm.generate(PROMPT, max_new_tokens=length)
        times.append(perf_counter())
        assert len(answer.token_ids) == length
        return 0.0

    with tempfile.TemporaryDirectory() as folder:
        pipeline = staleflow.Pipeline(
            tasks=staleflow.ListTasks(lengths, seed=None, epochs=1),
            rollout=rollout,
            engines=[staleflow.VllmEngine(url, model=model, capacity=concurrency)],
            trainer=ScriptedTrainer(step_s=0.0, publish_s=0.0),
            config=staleflow.Config(
                steps=BATCHES, batch_size=len(lengths) // BATCHES, group_size=group_size, max_staleness=BATCHES
            ),
            coordinator=NeverSyncs(),
            run_dir=Path(folder) / "run",
            progress=False,
        )
        await pipeline.run()
    return sum(lengths) * group_size / (max(times) - min(times))


async def tokens_per_second(load: Load, samples: int) -> list[str]:
    """Rows of a table."""
    of_groups, concurrency = load.lengths, load.concurrency
    singly = [length for length in of_groups for _ in range(GROUP_SIZE)]
    closed, of_1, of_8 = [], [], []
    async with serving(load.size) as (url, model):
        await closed_loop(url, model, singly[: 2 * concurrency], concurrency)
        for sample in range(samples):
            say(f"tokens per second, {load.size}: sample {sample + 1} of {samples}")
            closed.append(await closed_loop(url, model, singly, concurrency))
            of_1.append(await through_pipeline(url, model, singly, concurrency, 1))
            of_8.append(await through_pipeline(url, model, of_groups, concurrency, GROUP_SIZE))
    what = f"{load.size}, {load.requests} requests of {load.shortest} to {load.longest} tokens, {concurrency} at a time"
    baseline = median(closed)
    rows = [("closed loop", closed), ("pipeline, groups of 1", of_1), (f"pipeline, groups of {GROUP_SIZE}", of_8)]
    return [
        f"| {what} | {name} | {median(found):,.0f} | {min(found):,.0f} to {max(found):,.0f} "
        f"| {median(found) / baseline:.3f} |"
        for name, found in rows
    ]


# -- weight updates ------------------------------------------------------------------------------------------------


class TimedApi(VllmApi):
    """Remembers of the newest update how long the server has paused, and the worker has pulled."""

    async def pause(self) -> None:
        """Begins it."""
        self.paused_s = perf_counter()
        await super().pause()

    async def resume(self) -> None:
        """Ends it."""
        await super().resume()
        self.resumed_s = perf_counter()

    async def prefetch(self, source: dict[str, int | str]) -> list[Prefetch]:
        """Called until it is done."""
        progress = await super().prefetch(source)
        self.pull_s = progress[0].seconds
        return progress


class Update(NamedTuple):
    """What one update took. ``lost_tokens`` is what would have been generated, less what was."""

    pull_s: float
    pause_s: float
    first_token_s: float
    lost_tokens: float


async def update(
    api: TimedApi, updates: WeightUpdates, requests: VllmRequests, weights: staleflow.TcpParameterServer, model: Path
) -> Update:
    """Publish the next version, and have the server serve it."""
    version = updates.version + 1
    before = await api.load()
    watched_s = perf_counter()
    await asyncio.sleep(WATCHED_S)
    rate = ((await api.load()).generated_tokens - before.generated_tokens) / (perf_counter() - watched_s)
    with weights.publishing(version) as folder:
        await asyncio.to_thread(shutil.copy, model / "model.safetensors", folder)
    published_s = perf_counter()
    published = await api.load()
    with weights.pulling(version) as folder:
        await updates.update(version, folder)
    after, after_s = await api.load(), perf_counter()
    first = await requests.generate(GenerateRequest(f"first-{version}", PROMPT, 1))
    assert first.versions == [version]
    return Update(
        pull_s=api.pull_s,
        pause_s=api.resumed_s - api.paused_s,
        first_token_s=perf_counter() - published_s,
        lost_tokens=rate * (after_s - published_s) - (after.generated_tokens - published.generated_tokens),
    )


async def keep_busy(requests: VllmRequests, number: int) -> None:
    """Generate without end."""
    count = 0
    while True:
        count += 1
        await requests.generate(GenerateRequest(f"{number}.{count}", PROMPT, ENDLESS_TOKENS))


def memory_copies_per_second(size: int, samples: int) -> float:
    """Bytes per second of one thread that copies so many from memory that is in use to memory that is in use."""
    source, target = np.ones(size, np.uint8), np.full(size, 2, np.uint8)
    found = []
    for _ in range(samples):
        began_s = perf_counter()
        np.copyto(target, source)
        found.append(size / (perf_counter() - began_s))
    return median(found)


async def weight_updates(size: Size, samples: int) -> list[str]:
    """What was updated, and the rows of a table."""
    rows = []
    before: WeightUpdates | None = None
    weights = staleflow.TcpParameterServer("127.0.0.1", secret=SECRET)
    async with serving(size) as (url, model):
        try:
            total = (model / "model.safetensors").stat().st_size
            copies = memory_copies_per_second(total, samples)
            for path, pull_from in (("folder", None), ("TCP", weights.address)):
                for concurrency in (0, 8):
                    say(f"updates of {total / 1e6:.0f} MB, by {path}, beside {concurrency} requests")
                    async with connected(url, model, pull_from, before) as (api, requests, updates):
                        generating = [asyncio.create_task(keep_busy(requests, index)) for index in range(concurrency)]
                        taken = [await update(api, updates, requests, weights, model) for _ in range(samples + 1)][1:]
                        for task in generating:
                            assert not task.done()
                            task.cancel()
                        before = updates
                    pull_s, pause_s, first_token_s, lost = (median(column) for column in zip(*taken, strict=True))
                    longest_s = max(sample.pause_s for sample in taken)
                    rows.append(
                        f"| {path} | {concurrency} | {pull_s:.2f} s | {total / pull_s / 1e9:.2f} GB/s "
                        f"| {total / pull_s / copies:.2f} | {pause_s:.2f} s | {longest_s:.2f} s "
                        f"| {first_token_s:.2f} s | {lost:,.0f} |"
                    )
        finally:
            weights.close()
    what = f"{size}, {total / 1e6:.0f} MB in float32; one thread copies memory at {copies / 1e9:.1f} GB/s here."
    return [what, *rows]


@asynccontextmanager
async def connected(
    url: str, model: Path, pull_from: str | None, before: WeightUpdates | None
) -> AsyncIterator[tuple[TimedApi, VllmRequests, WeightUpdates]]:
    """The parts of a :class:`staleflow.VllmEngine`, with a clock in one of them."""

    def die(error: Exception) -> None:
        raise error

    api = TimedApi("server", url)
    updates = WeightUpdates(api, Pull(api, pull_from), timeout_s=600.0, die=die)
    await updates.adopt(before)
    requests = VllmRequests(api, model=str(model), temperature=1.0, timeout_s=600.0, served=lambda: updates.version)
    try:
        yield api, requests, updates
    finally:
        await updates.close()
        await requests.close()
        await api.close()


# -- all of it -----------------------------------------------------------------------------------------------------

HEADS = {
    "tokens": (
        "Tokens per second",
        "A closed loop sends the same requests straight to the same server. In the pipeline nothing is trained and "
        "no weights are synced; its requests are admitted, routed, answered, checked, recorded and accounted for.",
        "| load | what | tokens/s | of all samples | of the closed loop |\n|---|---|--:|--:|--:|",
    ),
    "updates": (
        "Weight updates",
        "Pull: until the server's worker has the weights at hand, with the share of the rate of a plain copy; it "
        "generates meanwhile. Over TCP they are received and checked. From a folder in shared memory nothing is "
        "copied: its pages are mapped, and what copying there is takes place in the swap. Pause: without generation. "
        "First token: from the publish to an answer sampled with the new weights. Lost: tokens that would have been "
        "generated from the publish to the end of the pause.",
        "| by | requests | pull | rate | of a copy | pause | longest | first token | tokens lost |"
        "\n|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ),
    "replies": (
        "Large replies",
        "How late the event loop is that has asked for them, while they arrive: 2.5 MB of JSON each, from a stub in "
        "another process. *staleflow* is the vLLM engine's way; *obvious* decodes the JSON on the loop and walks "
        "through the tokens in Python.",
        "",
    ),
}


def measured(part: str, samples: int) -> list[str]:
    """The lines below a part's heading."""
    if part == "replies":
        return [replies.compare(200, 20_000, samples)]
    _, _, head = HEADS[part]
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if part == "updates":
            what, *rows = runner.run(weight_updates(SMOLLM, samples))
            return [what, "", head, *rows]
        return [head, *(row for load in LOADS for row in runner.run(tokens_per_second(load, samples)))]


def main() -> int:
    """Measure what the command line asks for and write the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--samples", type=int, default=5, help="of every figure (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="page to write (default: %(default)s)")
    options = parser.parse_args()
    machine = this_machine()
    lines = [
        "# Beside a real vLLM server",
        "",
        f"{today()}, {machine.cores} cores of {machine.processor}, no GPU, load average {machine.load_average:.2f} "
        f"before, commit {commit() or 'unknown'}; medians of {options.samples}.",
    ]
    for part in options.parts:
        title, note, _ = HEADS[part]
        lines += ["", f"## {title}", "", note, "", *measured(part, options.samples)]
    page = "\n".join([*lines, ""])
    print(page)
    options.out.write_text(page)
    return 0


def say(what: str) -> None:
    """Progress."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
