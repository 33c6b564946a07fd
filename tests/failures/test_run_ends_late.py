"""All steps are done, and something that nobody needs any more is still under way."""

import asyncio
from pathlib import Path

from support import Scripted

from staleflow import Config
from staleflow.testing import ScriptedEngine, ScriptedTrainer


def test_H11_sync_that_nobody_needs_does_not_hold_up_the_end(scripted: Scripted) -> None:
    """The last publish starts syncs that nobody needs; their engines stop serving before they confirm."""

    class AnswersWhileItRuns(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.asked: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()

        async def run(self) -> None:
            while True:
                version, answer = await self.asked.get()
                await asyncio.sleep(0.05)
                self.version = version
                answer.set_result(version)

        async def update_weights(self, version: int, weights: Path) -> int:
            answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self.asked.put_nowait((version, answer))
            async with asyncio.timeout(120):
                return await answer

    class SavesFast(ScriptedTrainer):
        async def save(self, folder: Path) -> None:
            await asyncio.sleep(0.01)

    config = Config(steps=3, batch_size=1, group_size=1)
    run = scripted(config, engines=[AnswersWhileItRuns()], trainer=SavesFast())
    assert run.run().wall_s < 5
