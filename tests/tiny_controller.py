"""A controller for tests: ``python -m tiny_controller LOG``. Starts a child, prints its pid, then never returns."""

import asyncio
import sys
from pathlib import Path

from tiny_child import Ask, Reply

from staleflow.errors import EngineError
from staleflow.process import Child


async def main() -> None:
    child = await Child.spawn("child", "tiny_child", log_path=Path(sys.argv[1]), receives=Reply, error=EngineError)
    await child.send(Ask("are you there?"))
    print((await child.receive()).pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
