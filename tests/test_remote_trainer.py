"""Ranks that torchrun has started: let in if they know the secret, spoken to as those of this machine."""

import asyncio
import inspect
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from staleflow import LocalTrainer, RemoteTrainer
from staleflow.errors import ConfigError, TrainerError
from staleflow.process import Wire, frame
from staleflow.testing import character_llama
from staleflow.trainer.handshake import SECRET_VARIABLE, Welcome, challenge, connect, hello, is_welcome, welcome
from staleflow.trainer.local import TrainerSettings
from staleflow.trainer.protocol import Answer
from staleflow.trainer.remote import TrainerOptions

SECRET = "correct horse battery staple"
END_S = 30.0


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, as far as the controller looks."""
    (tmp_path / "config.json").touch()
    return tmp_path


async def listening(trainer: RemoteTrainer) -> str:
    while trainer.address.endswith(":0"):  # noqa: ASYNC110 - nobody but this test waits for it
        await asyncio.sleep(0.01)
    return trainer.address


class AdvancedLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Pretender:
    """A rank without a model: the wire of one, which answers as told."""

    def __init__(self, wire: Wire[TrainerSettings]) -> None:
        self.wire = wire

    @classmethod
    async def at(cls, address: str, rank: int, size: int = 2) -> "Pretender":
        connection = await asyncio.to_thread(connect, address, rank, size)
        return cls(Wire(*await asyncio.open_connection(sock=connection), TrainerSettings))

    async def load(self) -> None:
        await self.wire.receive()
        self.wire.post(frame(Answer(0)))


def test_options_are_those_of_the_local_trainer() -> None:
    parameters = inspect.signature(LocalTrainer).parameters
    assert set(TrainerOptions.__annotations__) == set(parameters) - {"model", "ranks"}


def test_proof_is_good_for_one_side_once() -> None:
    asked, other = challenge(), challenge()
    answer = hello(SECRET.encode(), asked, rank=1, size=2)
    said = welcome(SECRET.encode(), asked, answer)
    assert said is not None
    assert is_welcome(SECRET.encode(), asked, answer, said)
    assert welcome(SECRET.encode(), other, answer) is None, "not of this connection"
    assert welcome(b"another secret, just as long", asked, answer) is None
    assert not is_welcome(SECRET.encode(), asked, answer, Welcome(answer.proof)), "the rank's own, sent back"


@pytest.mark.parametrize("short", ["", "too short"])
def test_secret_that_could_be_guessed_is_refused(folder: Path, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, short)
    with pytest.raises(ConfigError, match=rf"{SECRET_VARIABLE} has {len(short)} characters; give .* at least 16"):
        RemoteTrainer(folder, ranks=2, listen="127.0.0.1:0")


@pytest.mark.parametrize("listen", ["29400", ":29400", "host:port", "host"])
def test_address_that_is_none_is_refused(folder: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match="it must be 'address:port'"):
        RemoteTrainer(folder, ranks=2, listen=listen)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_are_let_in_and_strangers_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    trainer = RemoteTrainer(folder, ranks=2, listen="127.0.0.1:0")

    async def main() -> None:
        starting = asyncio.create_task(trainer.start(folder))
        address = await listening(trainer)
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readexactly(4)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1000)
        writer.close()
        monkeypatch.setenv(SECRET_VARIABLE, "another secret, just as long")
        with pytest.raises(TrainerError, match=rf"did not let rank 0 in: .*is {SECRET_VARIABLE} the same"):
            await Pretender.at(address, 0)
        monkeypatch.setenv(SECRET_VARIABLE, SECRET)
        lost = await Pretender.at(address, 1)
        lost.wire.abort()
        ranks = {rank: await Pretender.at(address, rank) for rank in order}
        await asyncio.gather(*(rank.load() for rank in ranks.values()))
        await starting
        watching = asyncio.create_task(trainer.run())
        ranks[1].wire.abort()
        with pytest.raises(TrainerError, match=r"trainer-1 at 127.0.0.1:\d+ is gone .*; its log is where torchrun"):
            await watching
        await trainer.stop()
        await trainer.stop()
        with pytest.raises(ConnectionError):
            await ranks[0].wire.receive()
        ranks[0].wire.abort()

    asyncio.run(main())


def test_ranks_that_do_not_come_are_named(folder: Path) -> None:
    trainer = RemoteTrainer(folder, ranks=3, listen="127.0.0.1:0", connect_timeout_s=600.0)
    loop = AdvancedLoop()

    async def main() -> None:
        starting = asyncio.create_task(trainer.start(folder))
        rank = await Pretender.at(await listening(trainer), 1, size=3)
        while 1 not in trainer._present:  # noqa: ASYNC110 - nobody but this test waits for it
            await asyncio.sleep(0.01)
        loop.ahead_s = 600.0
        with pytest.raises(TrainerError, match=r"ranks 0, 2 of 3 did not connect to 127.0.0.1:\d+ within 600 s"):
            await starting
        with pytest.raises(ConnectionError):
            await rank.wire.receive()
        rank.wire.abort()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_another_number_of_ranks_ends_the_start(folder: Path) -> None:
    trainer = RemoteTrainer(folder, ranks=2, listen="127.0.0.1:0")

    async def main() -> None:
        starting = asyncio.create_task(trainer.start(folder))
        rank = await Pretender.at(await listening(trainer), 2, size=4)
        with pytest.raises(TrainerError, match=r"is rank 2 of 4, but the trainer has ranks=2"):
            await starting
        with pytest.raises(ConnectionError):
            await rank.wire.receive()
        rank.wire.abort()

    asyncio.run(main())


def test_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TrainerError, match=rf"cannot listen at {address}: "):
            asyncio.run(RemoteTrainer(folder, ranks=2, listen=address).start(folder))


def launch(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [child for child in found if "staleflow.trainer.rank" in " ".join(child.cmdline())]


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_ranks_of_torchrun_train_and_publish_and_end_with_the_first_that_dies(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from models import ALPHABET, batch, figures, make_learner

    model = character_llama(tmp_path / "model", ALPHABET, hidden_size=32)
    trainer = RemoteTrainer(model, ranks=2, listen="127.0.0.1:0", learning_rate=1e-3)
    expected = make_learner(model).step(batch())
    launched: list[subprocess.Popen[str]] = []

    async def main() -> None:
        starting = asyncio.create_task(trainer.start(tmp_path))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        command += ["staleflow.trainer.rank", await listening(trainer)]
        launched.append(await asyncio.to_thread(launch, command))
        await starting
        assert figures(await trainer.step(batch())) == pytest.approx(figures(expected), rel=1e-4, abs=1e-6)
        (tmp_path / "published").mkdir()
        await trainer.publish(tmp_path / "published")
        assert len(list((tmp_path / "published").iterdir())) == 2
        watching = asyncio.create_task(trainer.run())
        ranks = descendants(launched[0])
        assert len(ranks) == 2
        ranks[0].kill()
        struck_s = time.monotonic()
        with pytest.raises(TrainerError, match=r"trainer-\d at 127.0.0.1:\d+ is gone"):
            await watching
        with pytest.raises(TrainerError):
            await trainer.step(batch(1))
        await trainer.stop()
        assert time.monotonic() - struck_s < END_S

    try:
        asyncio.run(main())
        assert launched[0].wait(END_S) != 0
    finally:
        for process in launched:
            for rank in descendants(process) if process.poll() is None else []:
                rank.kill()
            process.kill()
            process.communicate()
