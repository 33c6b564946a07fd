from typing import Any

import msgspec
import pytest

from staleflow.engines.base import check_generation
from staleflow.errors import EngineError
from staleflow.types import GenerateRequest, Generation

REQUEST = GenerateRequest("1.0.0.0", [1, 2], max_new_tokens=3)
GOOD = Generation("1.0.0.0", [4, 5, 6], [-0.1, -0.2, 0.0], [2, 3, 3], "length")


def check(**changes: Any) -> None:
    check_generation(REQUEST, msgspec.structs.replace(GOOD, **changes), oldest=2, published=3, vocabulary=14)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"versions": [2, 2, 2]},
        {"versions": [3, 3, 3]},
        {"token_ids": [4], "logprobs": [-30.0], "versions": [2]},
        {"logprobs": [1e-6, 0.0, -1.0]},
    ],
    ids=["as it is", "oldest", "newest", "short", "rounded"],
)
def test_well_formed_reply_is_taken(changes: dict[str, Any]) -> None:
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-0.1, -0.2]}, "3 tokens, 2 logprobs and 3 versions"),
        ({"versions": [2, 3]}, "3 tokens, 3 logprobs and 2 versions"),
        ({"token_ids": [4, 5]}, "2 tokens, 3 logprobs"),
        ({"token_ids": [], "logprobs": [], "versions": []}, "0 tokens; at least 1"),
        ({"token_ids": [4] * 4, "logprobs": [-1.0] * 4, "versions": [2] * 4}, "4 tokens; at least 1 and at most 3"),
        ({"logprobs": [-0.1, float("nan"), -0.1]}, "logprob nan at token 1"),
        ({"logprobs": [-0.1, -0.1, float("-inf")]}, "logprob -inf at token 2"),
        ({"logprobs": [0.7, -0.1, -0.1]}, "logprob 0.7 at token 0"),
        ({"versions": [2, 3, 4]}, "version 4 at token 2; it must be between 2 and 3"),
        ({"versions": [1, 2, 3]}, "version 1 at token 0; it must be between 2 and 3"),
        ({"versions": [3, 2, 3]}, "versions go backwards"),
        ({"finish_reason": "truncated"}, "it ended as truncated"),
        ({"prompt_logprobs": [-1.0]}, "1 prompt logprobs; 0 were asked for"),
        ({"token_ids": [4, 14, 6]}, "token id 14 at position 1 is outside of the vocabulary of 14"),
        ({"token_ids": [4, 5, -1]}, "token id -1 at position 2 is outside of the vocabulary of 14"),
        ({"request_id": "1.1.0.0"}, r"it answers request 1\.1\.0\.0"),
    ],
)
def test_malformed_reply_is_refused_and_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=r"engine reply to 1\.0\.0\.0 refused: .*" + message):
        check(**changes)


@pytest.mark.parametrize("prompt_logprobs", [[], [-1.0]], ids=["cannot", "one per token after the first"])
def test_prompt_logprobs_are_taken_where_they_were_asked_for(prompt_logprobs: list[float]) -> None:
    request = msgspec.structs.replace(REQUEST, prompt_logprobs=True)
    generation = msgspec.structs.replace(GOOD, prompt_logprobs=prompt_logprobs)
    check_generation(request, generation, oldest=2, published=3)


@pytest.mark.parametrize(
    ("prompt_logprobs", "message"),
    [([-1.0, -1.0], "2 prompt logprobs; 1 were asked for"), ([float("nan")], "prompt logprob nan is not")],
)
def test_malformed_prompt_logprobs_are_refused(prompt_logprobs: list[float], message: str) -> None:
    request = msgspec.structs.replace(REQUEST, prompt_logprobs=True)
    generation = msgspec.structs.replace(GOOD, prompt_logprobs=prompt_logprobs)
    with pytest.raises(EngineError, match=message):
        check_generation(request, generation, oldest=2, published=3)


def test_interrupted_reply_may_be_empty() -> None:
    check(token_ids=[], logprobs=[], versions=[], finish_reason="interrupted")
