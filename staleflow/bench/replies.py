"""How late the event loop is while large replies of vLLM servers arrive: ``python -m staleflow.bench.replies``.

A server in another process answers many requests at once with many tokens each. Measured are the lag of the loop that
asks, from the first request to the last checked reply, and how long that takes. Beside it, in turns, what the obvious
client does: decode the JSON on the loop and walk through the tokens in Python.
"""

import argparse
import asyncio
import gc
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import aiohttp

from staleflow.bench.result import this_machine, today
from staleflow.engines.base import check_generation
from staleflow.engines.vllm_api import VllmApi
from staleflow.engines.vllm_requests import TOKENS_PATH, VllmRequests
from staleflow.loop_lag import LoopLag
from staleflow.runner import loop_factory
from staleflow.types import GenerateRequest, Generation

Contestant = Callable[[str, int, int], Awaitable[None]]


class Sample(NamedTuple):
    """One measurement."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    wall_s: float


def requests(count: int, tokens: int) -> list[GenerateRequest]:
    """So many, each for so many tokens."""
    return [GenerateRequest(f"{index}.0.0.0", [1, 2, 3], tokens) for index in range(count)]


async def staleflow(url: str, count: int, tokens: int) -> None:
    """The vLLM engine's own way."""
    api = VllmApi("bench", url)
    ours = VllmRequests(api, model="bench", temperature=1.0, timeout_s=600.0, served=lambda: 0)

    async def ask(request: GenerateRequest) -> None:
        check_generation(request, await ours.generate(request), oldest=0, published=0)

    try:
        async with asyncio.TaskGroup() as group:
            for request in requests(count, tokens):
                group.create_task(ask(request))
    finally:
        await ours.close()
        await api.close()


async def obvious(url: str, count: int, tokens: int) -> None:
    """All on the event loop."""

    async def ask(session: aiohttp.ClientSession, request: GenerateRequest) -> Generation:
        body = {"request_id": request.request_id, "sampling_params": {"max_tokens": request.max_new_tokens}}
        async with session.post(url + TOKENS_PATH, json=body) as response:
            choice = (await response.json())["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        versions = [0 for run in choice["weight_versions"] for _ in range(run["start"], run["end"])]
        return Generation(request.request_id, choice["token_ids"], logprobs, versions, "length")

    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session,
        asyncio.TaskGroup() as group,
    ):
        for request in requests(count, tokens):
            group.create_task(ask(session, request))


CONTESTANTS: dict[str, Contestant] = {"staleflow": staleflow, "obvious": obvious}


def measure(contestant: Contestant, url: str, count: int, tokens: int) -> Sample:
    """Measure once, on the kind of loop that :func:`staleflow.run` uses."""

    async def main() -> Sample:
        # As :func:`staleflow.run` does: a collection that walks through all that was imported would be charged here.
        gc.collect()
        gc.freeze()
        lag = LoopLag()
        sampling = asyncio.create_task(lag.run())
        await asyncio.sleep(0.1)
        began_s = perf_counter()
        await contestant(url, count, tokens)
        wall_s = perf_counter() - began_s
        # Let the meter see the last stall.
        await asyncio.sleep(0.05)
        sampling.cancel()
        return Sample(lag.quantile_ms(0.5), lag.quantile_ms(0.99), lag.quantile_ms(1.0), wall_s)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main())


@contextmanager
def serving() -> Iterator[str]:
    """A server in a process of its own; yields its URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "staleflow.bench.replies_server"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def compare(replies: int, tokens: int, samples: int) -> str:
    """Measure, in turns; returns a table of medians."""
    taken: dict[str, list[Sample]] = {name: [] for name in CONTESTANTS}
    with serving() as url:
        measure(staleflow, url, 2, tokens)
        for _ in range(samples):
            for name, contestant in CONTESTANTS.items():
                taken[name].append(measure(contestant, url, replies, tokens))
    lines = [f"{replies} replies of {tokens:,} tokens at once, medians of {samples}:", ""]
    lines += ["| client | loop lag p50 | p99 | max | wall time |", "|---|--:|--:|--:|--:|"]
    for name, figures in taken.items():
        p50, p99, most, wall_s = (statistics.median(column) for column in zip(*figures, strict=True))
        lines.append(f"| {name} | {p50:.1f} ms | {p99:.1f} ms | {most:.1f} ms | {wall_s:.1f} s |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m staleflow.bench.replies", description=__doc__)
    parser.add_argument("--replies", type=int, default=200, help="at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each reply (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="of each contestant, in turns (default: %(default)s)")
    options = parser.parse_args(arguments)
    machine = this_machine()
    print(f"{today()}, {machine.cores} cores of {machine.processor}, load average {machine.load_average:.2f} before\n")
    print(compare(options.replies, options.tokens, options.samples))


if __name__ == "__main__":
    main()
