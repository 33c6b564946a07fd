"""What the tests of the vLLM engine share: an engine connected to a stub server, on a virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from stub_vllm import StubVllm
from support import virtually
from tokenizers import Tokenizer, models, pre_tokenizers

from staleflow.engines.vllm import VllmEngine
from staleflow.errors import EngineError
from staleflow.types import GenerateRequest

Result = TypeVar("Result")

CONFIGURATION = '{"model_type": "llama", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2}'
PROMPT = [1, 2, 3]


class World:
    """A stub server, and the engine that is made for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stub = StubVllm()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(CONFIGURATION)
        self.url = ""
        self.engine: VllmEngine

    def add_tokenizer(self, *words: str) -> Tokenizer:
        """Give the model one that knows a few words; the server has the same."""
        words = words or ("<unk>", "The", "brown")
        vocabulary = {word: index for index, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(self.model / "tokenizer.json"))
        self.stub.tokenize = lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
        return tokenizer

    def make(self, **settings: object) -> VllmEngine:
        """The engine, not started."""
        self.engine = VllmEngine(self.url, model=self.model, **settings)  # type: ignore[arg-type]
        return self.engine

    def play(
        self, scene: Callable[["World"], Awaitable[Result]], *, connect: bool = True, **settings: object
    ) -> Result:
        """Run a scene against the server; the engine is started before, unless told otherwise, and stopped after."""

        async def main() -> Result:
            async with self.stub.serving(self.folder) as self.url:
                engine = self.make(**settings)
                try:
                    if connect:
                        await engine.start("engine-0", self.folder)
                        self.stub.calls.clear()
                    return await scene(self)
                finally:
                    await engine.stop()

        return virtually(main())

    def refused(self, *, match: str, kind: type[EngineError] = EngineError, **settings: object) -> None:
        """Starting fails with this error."""

        async def scene(world: World) -> None:
            with pytest.raises(kind, match=match):
                await world.engine.start("engine-0", world.folder)

        self.play(scene, connect=False, **settings)


def request(name: str = "1.0.0.0", tokens: int = 10, *, prompt_logprobs: bool = False) -> GenerateRequest:
    """Ask for so many tokens."""
    return GenerateRequest(name, PROMPT, tokens, prompt_logprobs)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; on a virtual clock this costs nothing."""
    while not condition():  # noqa: ASYNC110 - what it waits for is the state of a fake, which has no events
        await asyncio.sleep(0.001)
