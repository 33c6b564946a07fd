"""A controller for tests: ``python -m vllm_controller MODEL LOGS`` starts a vLLM server and never returns."""

import asyncio
import sys
from pathlib import Path

from staleflow.engines.vllm_server import VllmServer


async def main() -> None:
    server = VllmServer(sys.argv[1])
    await server.start("engine-0", Path(sys.argv[2]))
    print(server.pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
