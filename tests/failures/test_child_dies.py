"""A child process dies or hangs: its parent knows at once, and says why in the child's own words."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from support import Spawn
from tiny_child import Ask

from staleflow import process
from staleflow.errors import EngineError

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine for at most 20 seconds, on each kind of loop."""

    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(main, 20))

    return run


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_child_answers(run: Run, spawn: Spawn) -> None:
    async def main() -> None:
        child = await spawn("serve")
        for text in ("one", "two" * 100_000):
            await child.send(Ask(text))
            assert (await child.receive()).text == text
        await child.stop()
        await child.stop()
        assert gone(child.pid)

    run(main())


def test_H9_death_at_start_shows_the_last_lines_of_the_log(run: Run, spawn: Spawn) -> None:
    async def main() -> None:
        child = await spawn("die at start")
        with pytest.raises(EngineError, match="exited with code 1") as caught:
            await child.receive()
        message = str(caught.value)
        assert "ImportError: no module named torch" in message
        assert "line 1\n" not in message
        assert len(message) < 10_000
        await child.stop()

    run(main())


def test_H9_error_in_the_child_surfaces(run: Run, spawn: Spawn) -> None:
    async def main() -> None:
        child = await spawn("serve")
        await child.send(Ask("raise"))
        with pytest.raises(EngineError, match=r"(?s)exited with code 1.*RuntimeError: the child cannot go on"):
            await child.receive()
        await child.stop()

    run(main())


def test_H10_killed_child_is_noticed_by_whoever_waits(run: Run, spawn: Spawn) -> None:
    async def main() -> None:
        child = await spawn("serve")
        await child.send(Ask("are you there?"))
        await child.receive()
        receiving, watching = asyncio.ensure_future(child.receive()), asyncio.ensure_future(child.died())
        await asyncio.sleep(0)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"engine-0 \(pid \d+\) was ended by SIGKILL"):
            await receiving
        assert "SIGKILL" in str(await watching)
        with pytest.raises(EngineError, match="SIGKILL"):
            await child.send(Ask("and now?"))
        await child.stop()

    run(main())


@pytest.mark.parametrize("behaviour", ["hang", "serve"])
def test_child_that_hangs_is_killed(run: Run, spawn: Spawn, behaviour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.3)

    async def main() -> None:
        child = await spawn(behaviour)
        if behaviour == "serve":
            os.kill(child.pid, signal.SIGSTOP)
        await child.stop()
        assert gone(child.pid)
        assert "was ended by SIGKILL" in str(await child.died())

    run(main())


def test_child_stops_by_itself_though_its_answers_were_not_read(run: Run, spawn: Spawn) -> None:
    async def main() -> None:
        child = await spawn("flood")
        await child.receive()
        await child.stop(grace_s=60.0)
        assert "exited with code" in str(await child.died())

    run(main())


def test_message_that_the_child_cannot_decode_ends_it(run: Run, spawn: Spawn) -> None:
    class Nonsense(Ask, tag="nonsense", frozen=True):
        pass

    async def main() -> None:
        child = await spawn("serve")
        await child.send(Nonsense("?"))
        with pytest.raises(EngineError, match=r"(?s)exited with code 1.*ValidationError"):
            await child.receive()
        await child.stop()

    run(main())


def test_cancelled_receive_can_be_called_again(run: Run, spawn: Spawn) -> None:
    async def main() -> None:
        child = await spawn("serve")
        for n in range(50):
            await child.send(Ask(f"{n}" * 20_000))
        for n in range(50):
            answer = None
            while answer is None:
                receiving = asyncio.ensure_future(child.receive())
                await asyncio.wait({receiving}, timeout=0.0002)
                if receiving.cancel():
                    await asyncio.wait({receiving})
                answer = None if receiving.cancelled() else receiving.result()
            assert answer.text == f"{n}" * 20_000
        await child.stop()

    run(main())
