"""The other end of :mod:`staleflow.bench.replies`: answers every request with as many tokens as it asks for.

Runs in a process of its own, ``python -m staleflow.bench.replies_server``; prints its port once it listens.
"""

import asyncio
import json
import random
from functools import cache
from typing import Any

from aiohttp import web

CHUNK_BYTES = 1 << 18
VOCABULARY = 150_000
PLACE = b"REQUEST-ID"


@cache
def reply(tokens: int) -> bytes:
    """What a vLLM server sends for so many tokens, about 130 bytes for each."""
    rng = random.Random(tokens)
    content: list[dict[str, Any]] = []
    for _ in range(tokens):
        token = {"token_id": rng.randrange(VOCABULARY), "logprob": -rng.expovariate(1.0), "rank": rng.randrange(1, 99)}
        content.append(token | {"top_logprobs": [token]})
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [token["token_id"] for token in content],
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
        "logprobs": {"content": content},
    }
    body = {"request_id": PLACE.decode(), "model": "bench", "prompt_logprobs": None, "choices": [choice]}
    return json.dumps(body, separators=(",", ":")).encode()


async def answer(request: web.Request) -> web.StreamResponse:
    """The endpoint ``/inference/v1/generate``."""
    asked = await request.json()
    body = reply(asked["sampling_params"]["max_tokens"])
    body = body.replace(PLACE, f"generate-tokens-{asked['request_id']}".encode(), 1)
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    for start in range(0, len(body), CHUNK_BYTES):
        await response.write(body[start : start + CHUNK_BYTES])
    return response


async def serve() -> None:
    """Serve until the process is ended."""
    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
