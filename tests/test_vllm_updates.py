"""Weight updates of the vLLM engine: their order, what fails in them, and that a pause always ends."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from stub_vllm import TOKEN_S, TOKENS, Fault, hang_up, silence, status
from vllm_support import World, request, until

from staleflow.engines.vllm_update import RESUME_TIMEOUT_S
from staleflow.errors import EngineError, EngineStatusError, EngineTimeoutError
from staleflow.types import Generation

SWAP = ["/pause", "/is_paused", "/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info"]
RESUME = ["/resume", "/is_paused"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def serves_on(world: World, version: int) -> None:
    """The engine generates, unpaused, with this version."""
    generation = await world.engine.generate(request("9.0.0.0", 3))
    assert generation.versions == [version] * 3
    assert not world.stub.paused


def test_W5_weights_are_pulled_while_it_decodes_and_swapped_once_it_is_seen_to_have_stopped(world: World) -> None:
    world.stub.pulled = ["pulling", "pulling", "ready"]

    async def scene(world: World) -> Generation:
        running = asyncio.create_task(world.engine.generate(request(tokens=30)))
        await asyncio.sleep(2.5 * TOKEN_S)
        assert await world.engine.update_weights(7, Path("/dev/shm/staleflow/7")) == 7
        assert world.stub.paths()[1:] == ["/collective_rpc"] * 3 + SWAP + RESUME
        return await running

    generation = world.play(scene)
    assert generation.finish_reason == "length"
    # Tokens came in the meantime of the prefetch, and none during the pause.
    assert generation.versions.count(0) > 2
    source = {"version": 7, "folder": "/dev/shm/staleflow/7"}
    assert world.stub.bodies("/collective_rpc")[0] == {"method": "staleflow_prefetch", "kwargs": {"source": source}}
    assert world.stub.bodies("/pause") == [{"mode": "keep"}]
    assert world.stub.bodies("/update_weights") == [{"update_info": source}]
    assert world.stub.bodies("/finish_weight_update") == [{"weight_version": "7"}]


def test_an_engine_on_another_host_is_given_an_address(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.update_weights(7, world.folder)

    world.play(scene, pull_from="10.0.0.1:4000")
    source = {"version": 7, "address": "10.0.0.1:4000"}
    assert world.stub.bodies("/update_weights") == [{"update_info": source}]


@pytest.mark.parametrize("path", ["/collective_rpc", "/pause", "/start_weight_update", "/update_weights"])
@pytest.mark.parametrize("fault", [status(500, "no such version"), hang_up], ids=["500", "hung up"])
def test_V11_an_update_that_fails_before_the_swap_advances_no_version(world: World, path: str, fault: Fault) -> None:
    async def scene(world: World) -> None:
        world.stub.faults[path] = [fault]
        with pytest.raises(EngineError, match=path):
            await world.engine.update_weights(1, world.folder)
        await serves_on(world, 0)
        # What was left open does not stand in the way of the next update.
        assert await world.engine.update_weights(2, world.folder) == 2
        await serves_on(world, 2)

    world.play(scene)


def test_W1_the_servers_reason_is_in_the_error_and_its_status_too(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.faults["/update_weights"] = [status(500, "no parameter model.norm.weight")]
        with pytest.raises(
            EngineStatusError, match=r"engine-0 answered .* with 500: no parameter model\.norm"
        ) as caught:
            await world.engine.update_weights(1, world.folder)
        assert caught.value.status == 500

    world.play(scene)


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weights"])
def test_W1_a_deadline_covers_every_step_of_an_update(world: World, path: str) -> None:
    async def scene(world: World) -> None:
        world.stub.faults[path] = [silence]
        with pytest.raises(EngineTimeoutError, match=r"did not .* version 1 within 20 s \(update_timeout_s\)"):
            await world.engine.update_weights(1, world.folder)
        await serves_on(world, 0)

    world.play(scene, update_timeout_s=20.0)


def test_a_version_that_cannot_be_pulled_costs_no_pause(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.pulled = ["pulling", "failed"]
        world.stub.prefetch_error = "checksum of layer 3 is wrong"
        with pytest.raises(EngineError, match="engine-0 could not pull version 1: checksum of layer 3 is wrong"):
            await world.engine.update_weights(1, world.folder)
        assert "/pause" not in world.stub.paths()
        await serves_on(world, 0)

    world.play(scene)


def test_W5_nothing_is_written_if_the_server_decodes_on_after_its_pause(world: World) -> None:
    async def not_paused(request: web.Request) -> web.StreamResponse:
        return web.json_response({"is_paused": False})

    async def scene(world: World) -> None:
        world.stub.faults["/is_paused"] = [not_paused]
        with pytest.raises(EngineError, match="says that it is not paused"):
            await world.engine.update_weights(1, world.folder)
        assert "/start_weight_update" not in world.stub.paths()
        await serves_on(world, 0)

    world.play(scene)


def test_an_update_that_was_left_open_by_another_client_is_ended_first(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.update_active = True
        assert await world.engine.update_weights(1, world.folder) == 1
        assert world.stub.bodies("/finish_weight_update") == [{"weight_version": None}, {"weight_version": "1"}]

    world.play(scene)


def test_a_swap_whose_confirmation_is_lost_counts_if_the_server_serves_it(world: World) -> None:
    async def lost(request: web.Request) -> web.StreamResponse:
        world.stub.label = "1"
        world.stub.update_active = False
        return await hang_up(request)

    async def scene(world: World) -> None:
        world.stub.faults["/finish_weight_update"] = [lost]
        assert await world.engine.update_weights(1, world.folder) == 1
        await serves_on(world, 1)

    world.play(scene)


@pytest.mark.parametrize("fault", [status(500, "worker died"), hang_up, silence], ids=["500", "hung up", "slow"])
def test_a_swap_that_fails_ends_the_engine_and_with_it_every_request(world: World, fault: Fault) -> None:
    async def scene(world: World) -> None:
        watching = asyncio.create_task(world.engine.run())
        running = asyncio.create_task(world.engine.generate(request(tokens=10**6)))
        await until(lambda: bool(world.stub.running))
        world.stub.faults["/finish_weight_update"] = [fault]
        with pytest.raises(EngineError):
            await world.engine.update_weights(1, world.folder)
        for ended in (watching, running):
            with pytest.raises(EngineError, match="did not confirm version 1; what it serves now is unknown"):
                await ended
        for call in (world.engine.generate(request()), world.engine.update_weights(2, world.folder)):
            with pytest.raises(EngineError, match=r"engine-0 is dead: .* did not confirm version 1"):
                await call
        assert not world.stub.paused

    world.play(scene, update_timeout_s=20.0)


def test_V11_a_server_that_confirms_another_version_is_believed_nothing_more(world: World) -> None:
    async def other(request: web.Request) -> web.StreamResponse:
        return web.json_response({"weight_version": "5"})

    async def scene(world: World) -> None:
        world.stub.faults["/weight_info"] = [other]
        with pytest.raises(EngineError, match="serves weights '5' after it was given version 1"):
            await world.engine.update_weights(1, world.folder)
        with pytest.raises(EngineError, match="is dead"):
            await world.engine.generate(request())

    world.play(scene)


def test_resuming_is_retried_until_the_server_says_that_it_decodes(world: World) -> None:
    async def deaf(request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "resumed"})

    async def scene(world: World) -> None:
        world.stub.faults["/resume"] = [status(500), hang_up, deaf, status(503)]
        await world.engine.update_weights(1, world.folder)
        await serves_on(world, 1)
        assert world.stub.paths("/resume") == ["/resume"] * 5

    world.play(scene)


def test_a_server_that_stays_paused_is_dead_after_a_stated_time(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.always["/resume"] = status(500, "scheduler is gone")
        running = asyncio.create_task(world.engine.generate(request()))
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineError, match=r"could not be resumed within 30 s: .*scheduler is gone"):
            await world.engine.update_weights(1, world.folder)
        assert asyncio.get_running_loop().time() - began == pytest.approx(RESUME_TIMEOUT_S, abs=1.0)
        with pytest.raises(EngineError, match="could not be resumed"):
            await running

    world.play(scene)


def test_an_update_that_is_cancelled_leaves_the_server_decoding(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.faults["/update_weights"] = [silence]
        updating = asyncio.create_task(world.engine.update_weights(1, world.folder))
        await until(lambda: "/update_weights" in world.stub.paths())
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await serves_on(world, 0)

    world.play(scene)


def test_pause_and_resume_are_idempotent_and_an_update_in_between_stays_paused(world: World) -> None:
    async def scene(world: World) -> list[int]:
        running = asyncio.create_task(world.engine.generate(request(tokens=6)))
        await asyncio.sleep(2.5 * TOKEN_S)
        await world.engine.pause()
        await world.engine.pause()
        await world.engine.update_weights(1, world.folder)
        assert world.stub.paused
        await asyncio.sleep(100 * TOKEN_S)
        assert not running.done()
        await world.engine.resume()
        await world.engine.resume()
        return (await running).versions

    assert world.play(scene) == [0, 0, 1, 1, 1, 1]


def test_a_pause_that_fails_is_taken_back(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.faults["/pause"] = [status(500)]
        with pytest.raises(EngineStatusError):
            await world.engine.pause()
        await serves_on(world, 0)

    world.play(scene)


def test_stopping_leaves_no_server_paused(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.pause()
        await world.engine.stop()
        assert not world.stub.paused

    world.play(scene)


def test_updates_do_not_overlap(world: World) -> None:
    async def scene(world: World) -> None:
        await asyncio.gather(*(world.engine.update_weights(version, world.folder) for version in (1, 2)))
        order = world.stub.paths("/pause", "/finish_weight_update", "/resume")
        assert order == ["/pause", "/finish_weight_update", "/resume"] * 2
        await serves_on(world, 2)
        assert TOKENS in world.stub.paths()

    world.play(scene)
