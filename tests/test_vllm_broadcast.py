"""Weights that are broadcast: what the server is told, and that half of a version is never served."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from stub_vllm import Fault, hang_up, status
from tiny_sender import PORT
from vllm_support import CONFIGURATION, World, request

from staleflow.engines import vllm_carriers
from staleflow.engines.vllm import VllmEngine
from staleflow.errors import ConfigError, EngineError, EngineGoneError

pytestmark = pytest.mark.usefixtures("importable_children")

JOIN = "/init_weight_transfer_engine"
SWAP = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info"]
UPDATE = ["/pause", "/is_paused", "/update_weight_version", *SWAP, "/resume", "/is_paused"]
SHAPES = {"model.norm.weight": (4,), "model.embed_tokens.weight": (8, 4)}


class BroadcastWorld(World):
    """Its sender is a child all the same, so it lives in real time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stub.weight_transfer = {"backend": "nccl"}
        self.stub.worker_extension = ""
        self.publish("model", SHAPES)

    def publish(self, name: str, shapes: dict[str, tuple[int, ...]]) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
        return folder

    def live(self, scene: Callable[[VllmEngine], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.stub.serving(self.folder) as self.url:
                engine = self.make(broadcast_from="127.0.0.1")
                try:
                    await engine.start("engine-0", self.folder)
                    await scene(engine)
                finally:
                    await engine.stop()

        asyncio.run(main())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BroadcastWorld:
    monkeypatch.setattr(vllm_carriers, "SENDER", "tiny_sender")
    return BroadcastWorld(tmp_path)


def test_the_server_is_told_where_to_meet_and_what_comes(world: BroadcastWorld) -> None:
    async def scene(engine: VllmEngine) -> None:
        [join] = world.stub.bodies(JOIN)
        meeting = {"master_address": "127.0.0.1", "master_port": PORT, "rank_offset": 1, "world_size": 2}
        assert join["init_info"].items() >= meeting.items()
        assert world.stub.paths("/shutdown_weight_transfer_engine", JOIN) == ["/shutdown_weight_transfer_engine", JOIN]
        world.stub.calls.clear()
        assert await engine.update_weights(7, world.publish("7", SHAPES)) == 7
        assert world.stub.paths() == UPDATE
        [said] = world.stub.bodies("/update_weights")
        info = said["update_info"]
        assert {name: tuple(shape) for name, shape in zip(info["names"], info["shapes"], strict=True)} == SHAPES
        assert info["dtype_names"] == ["float32"] * 2
        assert (await engine.generate(request(tokens=2))).versions == [7, 7]

    world.live(scene)


def test_every_worker_of_every_replica_joins(world: BroadcastWorld) -> None:
    world.stub.parallel = {"world_size": 4, "data_parallel_size": 2}

    async def scene(engine: VllmEngine) -> None:
        assert world.stub.bodies(JOIN)[0]["init_info"]["world_size"] == 9

    world.live(scene)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (SHAPES | {"model.norm.weight": (5,)}, r"model\.norm\.weight is of shape \[5\] instead of \[4\]"),
        ({"model.norm.weight": (4,)}, r"model\.embed_tokens\.weight is missing"),
        (SHAPES | {"model.bias": (4,)}, r"model\.bias is unknown"),
    ],
)
def test_weights_of_another_model_cost_no_pause(
    world: BroadcastWorld, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    async def scene(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match=f"engine-0 cannot be given version 1: .*{message}"):
            await engine.update_weights(1, world.publish("1", shapes))
        assert "/pause" not in world.stub.paths()
        assert (await engine.generate(request(tokens=1))).versions == [0]

    world.live(scene)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_may_come_or_not_if_it_is_the_embedding(world: BroadcastWorld, tied: bool) -> None:
    configuration = msgspec.json.decode(CONFIGURATION) | {"tie_word_embeddings": tied}
    (world.model / "config.json").write_bytes(msgspec.json.encode(configuration))
    world.publish("model", SHAPES | {"lm_head.weight": (8, 4)})

    async def scene(engine: VllmEngine) -> None:
        assert await engine.update_weights(1, world.publish("1", SHAPES | {"lm_head.weight": (8, 4)})) == 1
        headless = world.publish("2", SHAPES)
        if tied:
            assert await engine.update_weights(2, headless) == 2
        else:
            with pytest.raises(EngineError, match=r"lm_head\.weight is missing"):
                await engine.update_weights(2, headless)

    world.live(scene)


def test_a_damaged_file_costs_no_pause(world: BroadcastWorld) -> None:
    async def scene(engine: VllmEngine) -> None:
        damaged = world.publish("1", SHAPES)
        (damaged / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not JSON")
        with pytest.raises(
            EngineError, match=r"cannot be given version 1: .*model\.safetensors is no safetensors file"
        ):
            await engine.update_weights(1, damaged)
        assert "/pause" not in world.stub.paths()

    world.live(scene)


def test_a_sender_that_has_died_is_noticed_before_the_model_is_touched(world: BroadcastWorld) -> None:
    async def scene(engine: VllmEngine) -> None:
        for name in ("unreadable", "2"):
            with pytest.raises(EngineError, match=r"(?s)engine-0-sender .* exited .*input/output error"):
                await engine.update_weights(2, world.publish(name, SHAPES))
        assert "/pause" not in world.stub.paths()
        # So that it can be had back.
        await engine.start("engine-0", world.folder)
        assert await engine.update_weights(2, world.publish("2", SHAPES)) == 2

    world.live(scene)


async def spoilt(engine: VllmEngine, world: BroadcastWorld, why: str) -> None:
    """It serves nothing any more, says why, and nobody can have it back by connecting again."""
    account = f"(?s)what it serves now is unknown: .*{why}"
    with pytest.raises(EngineGoneError, match=account):
        await engine.generate(request())
    with pytest.raises(EngineError, match=account):
        await engine.run()
    for anyone in (engine, engine, VllmEngine(world.url, model=world.model, broadcast_from="127.0.0.1")):
        world.stub.calls.clear()
        with pytest.raises(EngineError, match="may hold half of a version, since a broadcast to it has failed"):
            await anyone.start("engine-0", world.folder)
        assert JOIN not in world.stub.paths()
    assert not world.stub.paused


def test_a_sender_that_dies_takes_the_engine_with_it(world: BroadcastWorld) -> None:
    async def scene(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match=r"(?s)engine-0-sender .* exited .*unhandled system error of NCCL"):
            await engine.update_weights(1, world.publish("breaks", SHAPES))
        await spoilt(engine, world, "unhandled system error of NCCL")

    world.live(scene)


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("fault", [status(500, "no memory left"), hang_up], ids=["500", "hung up"])
def test_a_server_that_fails_once_its_model_was_touched_is_dead(world: BroadcastWorld, path: str, fault: Fault) -> None:
    async def scene(engine: VllmEngine) -> None:
        world.stub.faults[path] = [fault]
        with pytest.raises(EngineError, match=path):
            await engine.update_weights(1, world.publish("1", SHAPES))
        await spoilt(engine, world, path)

    world.live(scene)


def test_a_server_that_does_not_join_leaves_no_sender_behind(world: BroadcastWorld) -> None:
    world.stub.always[JOIN] = status(500, "no route to host")

    async def scene(engine: VllmEngine) -> None:
        raise AssertionError("it has started")

    with pytest.raises(EngineError, match=f"{JOIN} with 500: no route to host"):
        world.live(scene)


def test_a_server_that_expects_to_pull_is_refused(world: BroadcastWorld) -> None:
    world.stub.weight_transfer = {"backend": "staleflow"}
    world.refused(
        match=r"""has the weight transfer 'staleflow', .* --weight-transfer-config '\{"backend": "nccl"\}'""",
        broadcast_from="127.0.0.1",
    )


def test_weights_take_one_way(world: BroadcastWorld) -> None:
    with pytest.raises(ConfigError, match="pull_from and broadcast_from are both given"):
        VllmEngine("http://host", model=world.model, pull_from="host:4000", broadcast_from="10.0.0.1")
    with pytest.raises(ConfigError, match=r"broadcast_from is '10\.0\.0\.1:4000'; .* without a port"):
        VllmEngine("http://host", model=world.model, broadcast_from="10.0.0.1:4000")
