"""The embedded engine with a real child: what it samples, records and survives."""

import asyncio
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("torch")

from models import (
    ALPHABET,
    EOS,
    VOCABULARY,
    always,
    endless_llama,
    load,
    plain_logprobs,
    write_parameters,
)

from staleflow import EmbeddedEngine
from staleflow.engines.base import check_generation
from staleflow.engines.embedded import Ready, Setup
from staleflow.errors import ConfigError, EngineError
from staleflow.process import Child
from staleflow.testing import character_llama
from staleflow.types import GenerateRequest, Generation

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

Result = TypeVar("Result")
PROMPT = [3, 4, 5]
CERTAIN = 7
CONTEXT_TOKENS = 2048
LONG = 2000
"""So many tokens take seconds. Requests for them still run when something happens to them, and are then interrupted."""


class Serving:
    """An engine on a loop of its own that stands still between calls of :meth:`run`."""

    def __init__(self, engine: EmbeddedEngine, logs: Path) -> None:
        self.engine = engine
        self.runner = asyncio.Runner()
        self.runner.run(engine.start("engine-0", logs))
        self._serving = self.runner.get_loop().create_task(engine.run())
        self.version = 0

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        return self.runner.run(main)

    def ask(self, name: str, tokens: int, prompt: list[int] | None = None) -> "asyncio.Task[Generation]":
        request = GenerateRequest(name, PROMPT if prompt is None else prompt, tokens)
        return asyncio.get_running_loop().create_task(self._checked(request))

    async def _checked(self, request: GenerateRequest) -> Generation:
        generation = await self.engine.generate(request)
        check_generation(request, generation, oldest=0, published=self.version)
        return generation

    async def update(self, weights: Path) -> None:
        self.version += 1
        assert await self.engine.update_weights(self.version, weights) == self.version

    def close(self) -> None:
        self.runner.run(self._end())
        self.runner.close()

    async def _end(self) -> None:
        self._serving.cancel()
        await asyncio.wait({self._serving})
        await self.engine.stop()
        await self.engine.stop()


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_llama(tmp_path_factory.mktemp("endless"), max_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def random_weights(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's own weights."""
    return write_parameters(load(endless), tmp_path_factory.mktemp("weights") / "random")


@pytest.fixture(scope="module")
def certain_weights(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that say ``CERTAIN``, whatever they have read."""
    return write_parameters(always(load(endless), CERTAIN), tmp_path_factory.mktemp("weights") / "certain")


@pytest.fixture(scope="module")
def serving(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = Serving(EmbeddedEngine(endless, capacity=16), tmp_path_factory.mktemp("logs"))
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model with an end token, sampled at another temperature, with a cache that four requests overfill."""
    model = character_llama(tmp_path_factory.mktemp("model"), ALPHABET, hidden_size=32, max_tokens=512)
    serving = Serving(
        EmbeddedEngine(model, capacity=8, cache_tokens=128, temperature=0.5), tmp_path_factory.mktemp("logs")
    )
    yield serving
    serving.close()


def test_logprobs_are_those_of_the_model(serving: Serving, endless: Path) -> None:
    async def main() -> list[Generation]:
        prompts = [[2 + index % 12] * (1 + index) for index in range(20)]
        return await asyncio.gather(*(serving.ask(f"a{i}", 5 + i, prompt) for i, prompt in enumerate(prompts)))

    plain = load(endless)
    for index, generation in enumerate(serving.run(main())):
        assert len(generation.token_ids) == 5 + index
        assert generation.finish_reason == "length"
        assert set(generation.versions) == {0}
        expected = plain_logprobs(plain, [2 + index % 12] * (1 + index), generation.token_ids)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)
    assert serving.engine.max_model_tokens == CONTEXT_TOKENS


def test_update_in_flight_loses_nothing_and_names_every_token(
    serving: Serving, endless: Path, random_weights: Path, certain_weights: Path
) -> None:
    """Every token of the old version has the old weights' logprob; every later one is the certain token."""

    async def main() -> list[Generation]:
        await serving.update(random_weights)
        marker = serving.ask("b-marker", 20)
        long = [serving.ask(f"b{index}", LONG) for index in range(8)]
        short = [serving.ask(f"b-short{index}", 100) for index in range(16)]  # more than the capacity
        # The long ones have nearly as many tokens as this one when it ends.
        await marker
        await serving.update(certain_weights)
        answers = await asyncio.gather(*short)
        for index in range(8):
            await serving.engine.interrupt(f"b{index}")
        return [*await asyncio.gather(*long), *answers]

    generations = serving.run(main())
    old, new = serving.version - 1, serving.version
    plain, certain, switched = load(endless), always(load(endless), CERTAIN), 0
    for generation in generations:
        tokens, switch = len(generation.token_ids), generation.versions.count(old)
        assert generation.versions == [old] * switch + [new] * (tokens - switch)
        expected = plain_logprobs(plain, PROMPT, generation.token_ids)
        assert generation.logprobs[:switch] == pytest.approx(expected[:switch], abs=1e-4)
        assert generation.token_ids[switch:] == [CERTAIN] * (tokens - switch)
        expected = plain_logprobs(certain, PROMPT, generation.token_ids)
        assert generation.logprobs[switch:] == pytest.approx(expected[switch:], abs=1e-4)
        switched += 0 < switch < tokens
    assert switched >= 8
    assert [len(generation.token_ids) for generation in generations[8:]] == [100] * 16


def test_pause_holds_every_token_and_lets_weights_change(
    serving: Serving, random_weights: Path, certain_weights: Path
) -> None:
    async def main() -> tuple[Generation, Generation]:
        await serving.update(random_weights)
        running = serving.ask("c-running", LONG)
        await serving.ask("c-marker", 10)
        try:
            await serving.engine.pause()
            await serving.engine.pause()
            waiting = serving.ask("c-waiting", 1)
            done, _ = await asyncio.wait({running, waiting}, timeout=0.5)
            assert not done
            await serving.update(certain_weights)
            done, _ = await asyncio.wait({running, waiting}, timeout=0.2)
            assert not done
        finally:
            await serving.engine.resume()
        await serving.ask("c-after", 3)
        await serving.engine.interrupt("c-running")
        return await running, await waiting

    running, waiting = serving.run(main())
    old, new = serving.version - 1, serving.version
    assert {old, new} == set(running.versions)
    assert waiting.token_ids == [CERTAIN]
    assert waiting.versions == [new]


def test_cancelled_requests_leave_room(serving: Serving) -> None:
    async def main() -> None:
        marker = serving.ask("d-marker", 3)
        long = [serving.ask(f"d{index}", LONG) for index in range(64)]
        await marker
        for task in long[:60]:
            task.cancel()
        ended = await asyncio.gather(*long[:60], return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        later = await asyncio.gather(*(serving.ask(f"d-later{index}", 3) for index in range(8)))
        assert [len(generation.token_ids) for generation in later] == [3] * 8
        # These had not begun and are still running: the cancelled ones did not hold up the later ones.
        assert not any(task.done() for task in long[60:])
        for index in range(60, 64):
            await serving.engine.interrupt(f"d{index}")
        assert min([len((await task).token_ids) for task in long[60:]]) > 0
        assert serving.engine._generations == {}

    serving.run(main())


def test_interrupted_requests_answer_with_what_they_have_sampled(
    serving: Serving, endless: Path, random_weights: Path
) -> None:
    async def main() -> list[Generation]:
        await serving.update(random_weights)
        kept, marker = serving.ask("t-kept", 200), serving.ask("t-marker", 20)
        long = [serving.ask(f"t{index}", LONG) for index in range(24)]  # more than the capacity
        # Runs beside them from the start, as one of the first.
        await marker
        for index in range(24):
            await serving.engine.interrupt(f"t{index}")
        ended = await asyncio.gather(*long)
        assert len((await kept).token_ids) == 200
        assert serving.engine._generations == {}
        return ended

    plain = load(endless)
    sampled = []
    for generation in serving.run(main()):
        assert generation.finish_reason == "interrupted"
        sampled.append(len(generation.token_ids))
        expected = plain_logprobs(plain, PROMPT, generation.token_ids)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)
    assert max(sampled) < LONG
    assert min(sampled) == 0, "those that were still waiting had sampled nothing"


def test_interruption_of_what_has_ended_does_nothing(serving: Serving) -> None:
    async def main() -> None:
        running = serving.ask("u", 50)
        await serving.ask("u-short", 3)
        running.cancel()
        await asyncio.wait({running})
        for request in ("u", "u-short", "u-never"):
            await serving.engine.interrupt(request)
        assert len((await serving.ask("u-later", 3)).token_ids) == 3

    serving.run(main())


def test_answer_to_a_cancelled_command_is_not_taken_for_another(serving: Serving, random_weights: Path) -> None:
    async def main() -> None:
        for _ in range(3):
            pausing = asyncio.create_task(serving.engine.pause())
            await asyncio.sleep(0)
            pausing.cancel()
        await serving.engine.resume()
        await serving.update(random_weights)
        await serving.ask("e", 3)

    serving.run(main())


@pytest.mark.parametrize(
    ("prompt", "tokens"), [([], 3), ([3], 0), ([3] * 2040, 13), ([VOCABULARY], 3), ([-1], 3)], ids=str
)
def test_request_that_cannot_be_served_fails_alone(serving: Serving, prompt: list[int], tokens: int) -> None:
    async def main() -> None:
        other = serving.ask("f-other", 50)
        with pytest.raises(EngineError, match="could not serve f-bad"):
            await serving.engine.generate(GenerateRequest("f-bad", prompt, tokens))
        assert len((await other).token_ids) == 50

    serving.run(main())


def test_full_cache_evicts_and_continues(cramped: Serving) -> None:
    """Eviction costs a second prefill and nothing else: no token, logprob or version is lost or counted twice."""

    async def main() -> list[Generation]:
        return await asyncio.gather(
            *(cramped.ask(f"a{index}", 100, [2 + index % 12, 5]) for index in range(48)),
            cramped.ask("full", 4, [6] * 124),
        )

    generations = cramped.run(main())
    assert cramped.engine.max_model_tokens == 128
    plain = load(cramped.engine.model)
    for index, generation in enumerate(generations[:-1]):
        ended = generation.token_ids[-1] == EOS
        assert generation.finish_reason == ("stop" if ended else "length")
        assert EOS not in generation.token_ids[:-1]
        assert ended or len(generation.token_ids) == 100
        expected = plain_logprobs(plain, [2 + index % 12, 5], generation.token_ids, temperature=0.5)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)


def test_evicted_requests_keep_old_versions(cramped: Serving, tmp_path: Path) -> None:
    weights = write_parameters(load(cramped.engine.model), tmp_path / "weights")

    async def main() -> list[Generation]:
        requests = [cramped.ask(f"b{index}", 120, [4]) for index in range(64)]
        for _ in range(8):
            await asyncio.sleep(0.03)
            await cramped.update(weights)
        return await asyncio.gather(*requests)

    # ``ask`` has refused any reply whose versions are incomplete, go backwards or come from the future.
    assert len(cramped.run(main())) == 64


def test_cancelling_after_eviction_does_not_stop_the_engine(cramped: Serving, tmp_path: Path) -> None:
    """With the cache full, every running request is cancelled; those that wait for them are served."""
    # No end token is ever sampled, so that requests fill the cache.
    weights = write_parameters(always(load(cramped.engine.model), CERTAIN), tmp_path / "weights")

    async def main() -> None:
        await cramped.update(weights)
        # Somewhere between the first eviction and the first request to finish; faster machines get there sooner.
        for attempt, delay_s in enumerate((0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)):
            greedy = [cramped.ask(f"c{attempt}.{index}", 120) for index in range(6)]
            await asyncio.sleep(delay_s)
            for task in greedy:
                task.cancel()
            async with asyncio.timeout(20):
                later = await cramped.ask(f"c{attempt}-later", 3)
            assert later.token_ids == [CERTAIN] * 3

    cramped.run(main())


def test_engines_of_one_seed_do_not_sample_in_step(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a group are spread over engines; in step, they would all be the same trajectory."""
    seeds = []

    class Stub:
        async def send(self, setup: Setup) -> None:
            seeds.append(setup.seed)

        async def receive(self) -> Ready:
            return Ready(max_model_tokens=1)

    async def spawn(*_: object, **__: object) -> Stub:
        return Stub()

    monkeypatch.setattr(Child, "spawn", spawn)
    for name in ("engine-0", "engine-1", "engine-0"):
        asyncio.run(EmbeddedEngine(endless, seed=1).start(name, endless))
    assert seeds[0] == seeds[2] != seeds[1]


def test_of_a_dead_child_only_run_tells(endless: Path) -> None:
    class Dead:
        async def send(self, message: object) -> None:
            raise EngineError("a broken connection says least")

    async def main() -> None:
        engine = EmbeddedEngine(endless)
        engine._child = Dead()  # type: ignore[assignment]
        calls = [
            engine.generate(GenerateRequest("z", PROMPT, 3)),
            engine.update_weights(1, endless),
            engine.pause(),
            engine.resume(),
        ]
        asked = [asyncio.ensure_future(call) for call in calls]
        await engine.interrupt("z")
        _, unanswered = await asyncio.wait(asked, timeout=0.0)
        assert len(unanswered) == len(asked)
        for call in asked:
            call.cancel()
        await asyncio.wait(asked)

    asyncio.run(main())


def test_model_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')

    async def main() -> None:
        engine = EmbeddedEngine(tmp_path)
        try:
            with pytest.raises(EngineError, match=r"exited with code 1(.|\n)*no-such-model"):
                await engine.start("engine-0", tmp_path)
        finally:
            await engine.stop()

    asyncio.run(main())


def test_weights_of_another_model_end_the_engine(cramped: Serving, certain_weights: Path) -> None:
    """Last of its engine: a child that cannot do what it is told dies loudly."""

    async def main() -> None:
        update = asyncio.create_task(cramped.engine.update_weights(99, certain_weights.with_name("other")))
        with pytest.raises(EngineError, match=r"(?s)engine-0 .*exited with code 1.*Last lines of .*another model"):
            async with asyncio.timeout(30):
                await cramped._serving
        update.cancel()

    from safetensors.torch import load_file, save_file

    other = certain_weights.with_name("other")
    shutil.copytree(certain_weights, other)
    tensors = load_file(other / "b.safetensors")
    tensors["stranger"] = tensors.pop("model.norm.weight")
    save_file(tensors, other / "b.safetensors")
    cramped.run(main())


def test_settings_are_checked_before_anything_starts(endless: Path) -> None:
    for wrong in ({"capacity": 0}, {"cache_tokens": 0}, {"threads": 0}, {"temperature": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EmbeddedEngine(endless, **wrong)
    with pytest.raises(ConfigError, match="no such Hugging Face folder"):
        EmbeddedEngine(endless / "missing")
