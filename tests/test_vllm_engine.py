"""The life of the vLLM engine: settings, what is checked at connect, health, death and a second life."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stub_vllm import COMPLETIONS, TOKENS, Fault, StubVllm, hang_up, raw, silence, status
from support import virtually
from vllm_support import CONFIGURATION, World, request, until

from staleflow.engines.vllm import VllmEngine
from staleflow.engines.vllm_api import EngineLoad
from staleflow.errors import ConfigError, EngineError, EngineGoneError, EngineReplyError


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server": "localhost:8000"}, "server is 'localhost:8000'; it must be 'http://host:port'"),
        ({"server": "ftp://host"}, "server is"),
        ({"server": "http://"}, "server is"),
        ({"server": "http://host:99999"}, "server is"),
        ({"server": "http://[::1"}, "server is"),
        ({"server": "unix:relative.socket"}, "server is"),
        ({"model": "/no/such/folder"}, "no such Hugging Face folder"),
        ({"capacity": 0}, "capacity is 0"),
        ({"temperature": -1.0}, "temperature is"),
        ({"temperature": 0.001}, "it must be 0, or finite and at least 0.01"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"pull_from": "host"}, "pull_from is 'host'; it must be 'host:port'"),
        ({"pull_from": "host:0"}, "pull_from is"),
        ({"request_timeout_s": 0.0}, "request_timeout_s is 0.0"),
        ({"update_timeout_s": float("inf")}, "update_timeout_s is inf"),
        ({"unhealthy_after_s": float("nan")}, "unhealthy_after_s is nan"),
    ],
)
def test_a_setting_that_can_never_be_right_is_refused(world: World, settings: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"server": "http://localhost:8000", "model": world.model}
    with pytest.raises(ConfigError, match=message):
        VllmEngine(**(good | settings))


@pytest.mark.parametrize("server", ["http://localhost:8000", "https://[::1]:8000/engine/", "unix:/tmp/s", "http://h"])
def test_settings_go_into_the_run_folder(world: World, server: str) -> None:
    engine = VllmEngine(server, model=world.model, capacity=3)
    assert msgspec.json.decode(msgspec.json.encode(engine.settings))["server"] == server
    assert engine.capacity == 3


def test_connecting_tells_the_longest_sequence_and_samples_once(world: World) -> None:
    tokenizer = world.add_tokenizer()

    async def scene(world: World) -> None:
        await world.engine.start("engine-0", world.folder)
        assert world.engine.max_model_tokens == 512
        assert world.engine.vocabulary == 32
        assert world.engine.tokenizer is not None
        assert world.engine.tokenizer.to_str() == tokenizer.to_str()

    world.play(scene, connect=False)
    (body,) = world.stub.bodies(TOKENS)
    assert body["token_ids"] == [31]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1.dev3+gabc", "0.41.0"])
def test_supported_versions_connect(world: World, version: str) -> None:
    world.stub.version = version
    world.play(lambda world: asyncio.sleep(0))


@pytest.mark.parametrize("version", ["0.31.9", "0.9.2", "1.0.0", "dev"])
def test_a_server_of_another_version_is_refused(world: World, version: str) -> None:
    world.stub.version = version
    world.refused(match=rf"engine-0 at unix:.* runs vLLM {version}; install a version there that is at least 0\.32")


def test_what_is_no_vllm_server_is_refused(world: World) -> None:
    world.stub.always["/version"] = status(404, "no such page")
    world.refused(match="is no vLLM server: engine-0 answered GET .*/version with 404: no such page")
    world.stub.always["/version"] = raw(b"<html>hello</html>")
    world.refused(match="is no vLLM server: .* with something else than was expected.*it begins '<html>hello")
    world.stub.always["/version"] = hang_up
    world.refused(match="engine-0 hung up on GET")


def test_a_server_that_is_not_there_is_named(world: World) -> None:
    world.url = f"unix:{world.folder}/no.socket"

    async def scene() -> None:
        engine = world.make()
        with pytest.raises(EngineError, match=r"engine-0 cannot be reached at unix:.*no\.socket"):
            await engine.start("engine-0", world.folder)

    virtually(scene())


def test_a_port_where_nobody_listens_is_named(world: World, unused_port: int) -> None:
    async def scene() -> None:
        engine = VllmEngine(f"http://127.0.0.1:{unused_port}", model=world.model)
        with pytest.raises(
            EngineError, match=rf"cannot be reached at http://127\.0\.0\.1:{unused_port}: Connection refused"
        ):
            await engine.start("engine-0", world.folder)

    asyncio.run(scene())


def test_what_does_not_speak_http_is_refused(world: World) -> None:
    async def gibberish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        writer.close()

    async def scene() -> None:
        path = world.folder / "socket"
        async with await asyncio.start_unix_server(gibberish, path):
            engine = VllmEngine(f"unix:{path}", model=world.model)
            with pytest.raises(EngineError, match=r"is no vLLM server: what answers GET .* does not speak HTTP"):
                await engine.start("engine-0", world.folder)

    virtually(scene())


def test_a_server_that_never_answers_is_given_up(world: World) -> None:
    world.stub.always["/server_info"] = silence
    world.refused(match="did not answer GET .*/server_info within 120 s")


def test_a_server_without_development_endpoints_is_told_what_to_set(world: World) -> None:
    world.stub.always["/is_paused"] = status(404, "Not Found")
    world.refused(match="start it with the environment variable VLLM_SERVER_DEV_MODE=1")


def test_logprobs_of_another_distribution_are_refused(world: World) -> None:
    world.stub.logprobs_mode = "raw_logprobs"
    world.refused(match="reports raw_logprobs, .*start it with --logprobs-mode processed_logprobs")


@pytest.mark.parametrize(("transfer", "found"), [(None, "no weight transfer"), ({"backend": "nccl"}, "'nccl'")])
def test_a_server_without_the_plug_in_is_told_what_to_set(
    world: World, transfer: dict[str, str] | None, found: str
) -> None:
    world.stub.weight_transfer = transfer
    world.refused(match=rf"has .*{found}.*--weight-transfer-config '{{\"backend\": \"staleflow\"}}'")


def test_a_server_without_the_worker_extension_is_told_what_to_set(world: World) -> None:
    world.stub.worker_extension = ""
    world.refused(match=r"--worker-extension-cls staleflow\.engines\.vllm_plugin\.WeightPrefetch")


def test_another_tokenizer_behind_the_url_is_refused(world: World) -> None:
    world.add_tokenizer()
    world.stub.tokenize = lambda text: [7, 8]
    world.refused(match=r"has another tokenizer than .*model: it reads 'The 3 quick.* as \[7, 8\], not as \[1,")


def test_a_tokenizer_that_cannot_read_every_text_is_compared_by_its_own_words(world: World) -> None:
    tokenizer = world.add_tokenizer("one", "two")
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
        tokenizer.encode("three")
    world.stub.tokenize = lambda text: list(reversed(tokenizer.encode(text).ids))
    world.refused(match=r"has another tokenizer than .*model: it reads 'one two' as \[1, 0\], not as \[0, 1\]")


def test_a_server_without_a_tokenizer_cannot_be_compared(world: World) -> None:
    world.add_tokenizer()
    world.stub.always["/tokenize"] = status(400, "no tokenizer")
    world.refused(match="has no tokenizer to compare with that of .*model")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_model_of_another_shape_behind_the_url_is_refused(world: World, key: str) -> None:
    other = world.folder / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(json.loads(CONFIGURATION) | {key: 1}))
    world.stub.root = str(other)
    world.refused(
        match=rf"serves another model than .*model .*--model of the same folder.*loaded from .*other.* {key} 1 "
    )


def test_the_same_model_in_another_folder_is_accepted(world: World) -> None:
    world.stub.root = str(world.model)
    world.play(lambda world: asyncio.sleep(0))


def test_a_smaller_vocabulary_behind_the_url_is_refused(world: World) -> None:
    world.stub.always[TOKENS] = status(400, "Token id 31 is out of vocabulary")
    world.refused(match="serves another model than .*Token id 31 is out of vocabulary")


def test_a_server_that_cannot_sample_is_refused(world: World) -> None:
    world.stub.answer = lambda reply: reply | {"choices": []}
    world.refused(match="it has 0 choices", kind=EngineReplyError)


def test_a_server_without_both_endpoints_is_refused(world: World) -> None:
    world.stub.always[TOKENS] = world.stub.always[COMPLETIONS] = status(404, "Not Found")
    world.refused(match="/v1/completions with 404")


def test_a_server_that_serves_weights_of_another_run_is_refused(world: World) -> None:
    world.stub.label = "7"
    world.refused(match="serves weights '7' of another run.*restart that server")
    world.stub.label = "main"
    world.refused(match="weights named 'main' are of no policy version")


def test_a_server_that_a_dead_controller_left_paused_is_resumed(world: World) -> None:
    world.stub.paused = True
    world.stub.going_on.clear()

    async def scene(world: World) -> None:
        assert len((await world.engine.generate(request())).token_ids) == 10

    world.play(scene)


def test_load_adds_up_what_the_engines_in_the_server_report(world: World) -> None:
    async def scene(world: World) -> None:
        assert await world.engine.load() == EngineLoad(4, 6, 0.25, 8, 3_000_000)
        world.stub.always["/metrics"] = raw(b"vllm:num_requests_running 1\n")
        with pytest.raises(EngineReplyError, match="engine-0 has no vllm:kv_cache_usage_perc in /metrics"):
            await world.engine.load()

    world.play(scene)


async def death_of(engine: VllmEngine) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await engine.run()
    return caught.value


def test_a_dead_engine_in_a_living_server_is_noticed_at_once_and_ends_all_requests(world: World) -> None:
    async def scene(world: World) -> None:
        running = asyncio.create_task(world.engine.generate(request(tokens=10**6)))
        world.stub.always["/health"] = status(503)
        death = await death_of(world.engine)
        assert "the engine in engine-0 is dead" in str(death)
        assert asyncio.get_running_loop().time() < 5.0
        with pytest.raises(EngineGoneError, match="the engine in engine-0 is dead"):
            await running
        with pytest.raises(EngineGoneError, match="engine-0 is dead"):
            await world.engine.generate(request())

    world.play(scene)


@pytest.mark.parametrize("fault", [hang_up, status(500, "EngineCore encountered an issue")], ids=["hung up", "500"])
@pytest.mark.parametrize("health", [hang_up, status(503)], ids=["no server", "no engine"])
def test_a_request_that_fails_because_the_server_died_is_told_from_one_that_failed(
    world: World, fault: Fault, health: Fault
) -> None:
    async def scene(world: World) -> None:
        world.stub.always[TOKENS] = fault
        world.stub.always["/health"] = health
        with pytest.raises(EngineGoneError, match=r"engine-0 died with request 1\.0\.0\.0 unanswered: engine-0 "):
            await world.engine.generate(request())

    world.play(scene)


@pytest.mark.parametrize("fault", [silence, hang_up, status(500)], ids=["silent", "hung up", "500"])
def test_a_server_that_is_not_well_for_a_stated_time_is_dead(world: World, fault: Any) -> None:
    async def scene(world: World) -> None:
        await asyncio.sleep(1000.0)
        world.stub.always["/health"] = fault
        began = asyncio.get_running_loop().time()
        death = await death_of(world.engine)
        assert "engine-0 has not been well for 60 s (unhealthy_after_s)" in str(death)
        assert 60.0 <= asyncio.get_running_loop().time() - began < 75.0

    world.play(scene, unhealthy_after_s=60.0)


def test_a_server_that_is_well_again_in_time_lives_on(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.faults["/health"] = [status(500)] * 5
        watching = asyncio.create_task(world.engine.run())
        await asyncio.sleep(100.0)
        assert not watching.done()
        watching.cancel()
        await asyncio.wait({watching})

    world.play(scene, unhealthy_after_s=60.0)


def test_a_server_that_was_restarted_behind_our_back_is_dead(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.update_weights(3, world.folder)
        world.stub.label = "default"
        assert "serves weights 'default' although version 3 was confirmed" in str(await death_of(world.engine))

    world.play(scene)


def test_watching_does_not_mistake_an_update_for_a_restart(world: World) -> None:
    async def scene(world: World) -> None:
        watching = asyncio.create_task(world.engine.run())
        world.stub.pulled = ["pulling"] * 20 + ["ready"]
        await world.engine.update_weights(1, world.folder)
        await asyncio.sleep(10.0)
        assert not watching.done()
        watching.cancel()
        await asyncio.wait({watching})

    world.play(scene)


def test_after_a_death_it_starts_again_and_is_at_the_initial_weights(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.update_weights(3, world.folder)
        world.stub.label = "default"
        await death_of(world.engine)
        await world.engine.start("engine-0", world.folder)
        assert (await world.engine.generate(request())).versions == [0] * 10
        assert await world.engine.update_weights(4, world.folder) == 4

    world.play(scene)


def test_after_a_lost_connection_it_starts_again_with_what_was_confirmed(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.update_weights(3, world.folder)
        world.stub.faults["/health"] = [status(503)]
        await death_of(world.engine)
        await world.engine.start("engine-0", world.folder)
        assert (await world.engine.generate(request())).versions == [3] * 10

    world.play(scene)


def test_after_a_swap_that_nobody_confirmed_the_server_must_be_restarted(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.update_weights(3, world.folder)
        world.stub.faults["/finish_weight_update"] = [status(500)]
        with pytest.raises(EngineError):
            await world.engine.update_weights(4, world.folder)
        with pytest.raises(EngineError, match="of an update that was not confirmed: restart that server"):
            await world.engine.start("engine-0", world.folder)
        world.stub.label = "default"
        await world.engine.start("engine-0", world.folder)

    world.play(scene)


def test_a_stopped_engine_serves_nothing_and_can_be_started_again(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.pause()
        world.stub.always["/resume"] = silence
        await world.engine.stop()
        await world.engine.stop()
        for call in (world.engine.generate(request()), world.engine.resume(), world.engine.load()):
            with pytest.raises(EngineGoneError, match="engine-0 is dead: engine-0 was stopped"):
                await call
        world.stub.always.clear()
        await world.engine.start("engine-0", world.folder)
        assert len((await world.engine.generate(request())).token_ids) == 10

    world.play(scene)


class OwnServer:
    """Starts a stub; dies when told to."""

    settings = "a stub"

    def __init__(self, stub: StubVllm, url: str) -> None:
        self.stub = stub
        self.url = url
        self.lives = 0
        self.stopped = 0
        self.end: asyncio.Future[EngineError]

    async def start(self, name: str, log_folder: Path) -> str:
        self.lives += 1
        self.stub.label = "default"
        self.end = asyncio.get_running_loop().create_future()
        return self.url

    async def died(self) -> EngineError:
        return await asyncio.shield(self.end)

    async def stop(self) -> None:
        self.stopped += 1


def test_a_server_of_its_own_is_started_watched_started_again_and_stopped(world: World) -> None:
    async def scene(world: World) -> None:
        server = OwnServer(world.stub, world.url)
        engine = VllmEngine(server, model=world.model)
        await engine.start("engine-1", world.folder)
        running = asyncio.create_task(engine.generate(request(tokens=10**6)))
        await until(lambda: bool(world.stub.running))
        watching = asyncio.create_task(engine.run())
        await asyncio.sleep(0)
        server.end.set_result(EngineError("engine-1 (pid 7) was ended by SIGKILL"))
        for ended in (watching, running):
            with pytest.raises(EngineError, match=r"engine-1 \(pid 7\) was ended by SIGKILL"):
                await ended
        await engine.start("engine-1", world.folder)
        assert len((await engine.generate(request())).token_ids) == 10
        await engine.stop()
        await engine.stop()
        assert (server.lives, engine.settings.server) == (2, "a stub")
        assert server.stopped >= 1

    world.play(scene)


def test_a_server_of_its_own_that_is_unfit_is_stopped(world: World) -> None:
    async def scene(world: World) -> None:
        server = OwnServer(world.stub, world.url)
        world.stub.logprobs_mode = "raw_logits"
        engine = VllmEngine(server, model=world.model)
        with pytest.raises(EngineError, match="raw_logits"):
            await engine.start("engine-1", world.folder)
        assert server.stopped == 1

    world.play(scene)


def test_an_engine_that_was_not_started_says_so(world: World) -> None:
    engine = VllmEngine("http://localhost:1", model=world.model)

    async def scene() -> None:
        for call in (engine.generate(request()), engine.run(), engine.load(), engine.pause()):
            with pytest.raises(EngineError, match=r"the engine of .*model was not started"):
                await call
        await engine.interrupt("1.0.0.0")
        await engine.stop()

    virtually(scene())
