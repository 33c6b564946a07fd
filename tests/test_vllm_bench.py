"""The benchmark beside a vLLM server, on a stub: what it sends is what it says it measures."""

import asyncio
from pathlib import Path

import pytest
import vllm_engines
from stub_vllm import TOKENS, StubVllm
from vllm_support import CONFIGURATION

from staleflow.bench import replies

LENGTHS = [5, 7, 9, 3]
CONCURRENCY = 16


@pytest.mark.parametrize("group_size", [1, 8])
def test_the_pipeline_sends_every_request_once_and_syncs_nothing(tmp_path: Path, group_size: int) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(CONFIGURATION)
    stub = StubVllm()
    lengths = LENGTHS * (8 // group_size)

    async def main() -> float:
        async with stub.serving(tmp_path) as url:
            return await vllm_engines.through_pipeline(url, model, lengths, CONCURRENCY, group_size)

    assert asyncio.run(main()) > 0
    # The first request of all is the engine's own, at its start.
    asked = [body["sampling_params"]["max_tokens"] for body in stub.bodies(TOKENS)][1:]
    assert sorted(asked) == sorted(LENGTHS * 8)
    assert "/pause" not in stub.paths()


def test_groups_of_a_load_are_the_same_requests_as_its_single_ones() -> None:
    for load in vllm_engines.LOADS:
        assert len(load.lengths) * vllm_engines.GROUP_SIZE == load.requests
        assert len(load.lengths) % vllm_engines.BATCHES == 0
        assert all(load.shortest <= length <= load.longest for length in load.lengths)


def test_large_replies_are_compared_with_the_obvious_client() -> None:
    table = replies.compare(2, 10, 1)
    assert table.startswith("2 replies of 10 tokens at once, medians of 1:")
    assert [line.split(" | ")[0] for line in table.splitlines()[4:]] == ["| staleflow", "| obvious"]
