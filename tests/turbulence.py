"""Engines that misbehave by chance, and a coordinator that never leaves a request in peace."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from staleflow import clock
from staleflow.coordinator import Command, LeastLoad, Migrate, Snapshot, Sync
from staleflow.errors import EngineError, EngineGoneError
from staleflow.testing import ScriptedEngine
from staleflow.types import GenerateRequest, Generation, SyncMode

MODES: tuple[SyncMode, ...] = ("keep", "recompute", "drain", "abort")
END = 0


def greedy(request: GenerateRequest, rng: random.Random | None = None) -> Sequence[int]:
    """A script in which every token follows from those before it, wherever the text was cut."""
    text = list(request.token_ids)
    begin = len(text)
    while len(text) - begin < request.max_new_tokens:
        text.append((31 * sum(text) + 7 * len(text) + text[-1]) % 13)
        if text[-1] == END:
            break
    return text[begin:]


def told(prompt: list[int], max_new_tokens: int) -> list[int]:
    """What an engine that is never interrupted says."""
    return list(greedy(GenerateRequest("", prompt, max_new_tokens)))


class Mortal(ScriptedEngine):
    """Lives for a while; fails to start, to update, to hear and to answer now and then."""

    def __init__(self, seed: int, *, mean_life_s: float = 5.0, capacity: int = 8) -> None:
        super().__init__(greedy, seed=seed, token_s=0.02, update_s=0.05, capacity=capacity)
        self.rng = random.Random(f"mortal {seed}")
        self.mean_life_s = mean_life_s
        self.starts = 0
        self.dead = asyncio.Event()

    async def start(self, name: str, log_folder: Path) -> None:
        self.starts += 1
        await asyncio.sleep(self.rng.expovariate(2.0))
        if self.starts > 1 and self.rng.random() < 0.2:
            raise EngineError(f"{name} did not start")
        await super().start(name, log_folder)
        self.dead.clear()

    async def run(self) -> None:
        ends_s = clock.now() + self.rng.expovariate(1 / self.mean_life_s)
        while (left_s := ends_s - clock.now()) > 0:
            await asyncio.sleep(min(left_s, self.rng.expovariate(2.0)))
            # It lets go of a request by itself now and then.
            if self._running:
                self._running.discard(self.rng.choice(sorted(self._running)))
        self.dead.set()
        # Whoever asks may learn of it first.
        await asyncio.sleep(self.rng.expovariate(10.0))
        raise EngineError("died")

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.dead.is_set():
            raise EngineGoneError("the connection was refused")
        # On its way to the engine's scheduler: an interruption does not find it there.
        await asyncio.sleep(self.rng.expovariate(100.0))
        answer = await super().generate(request)
        if self.dead.is_set():
            # The answer of a dead engine comes late, or not at all.
            await asyncio.sleep(1.0 if self.rng.random() < 0.5 else 1000.0)
        return answer

    async def interrupt(self, request_id: str) -> None:
        if self.rng.random() < 0.8:
            await super().interrupt(request_id)

    async def update_weights(self, version: int, weights: Path) -> int:
        chance = self.rng.random()
        if chance < 0.03:
            raise EngineError("half of the weights are there")
        if chance < 0.05:
            return version - 1
        if chance < 0.08:
            await self.dead.wait()
            await asyncio.sleep(1000.0)
        return await super().update_weights(version, weights)


class Restless(LeastLoad):
    """Syncs in any of ``modes`` and moves requests about, by chance."""

    def __init__(self, seed: int, modes: Sequence[SyncMode] = MODES, *, moves: float = 0.1) -> None:
        super().__init__()
        self._rng = random.Random(f"restless {seed}")
        self._modes = modes
        self._moves = moves

    def decide(self, snapshot: Snapshot) -> list[Command]:
        commands = [
            msgspec.structs.replace(command, mode=self._rng.choice(self._modes))
            if isinstance(command, Sync)
            else command
            for command in super().decide(snapshot)
        ]
        if snapshot.running and self._rng.random() < self._moves:
            request = self._rng.choice(snapshot.running)
            commands.append(Migrate(request.request_id, self._rng.randrange(len(snapshot.engines))))
        return commands
