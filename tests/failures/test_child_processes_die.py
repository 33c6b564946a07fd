"""Real children die, or their controller does: a clear error or an orderly end, soon, with nothing left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from models import endless_llama, load
from processes import lives, until
from support import read_events

from staleflow import LLM, Config, EmbeddedEngine, ListTasks, LocalTrainer, Pipeline
from staleflow.errors import EngineError, StaleflowError, TrainerError
from staleflow.events import EngineRestarted, Failed, Published
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

START_S = 90.0
"""Until the first step is trained, on a busy machine."""
END_S = 30.0
"""From the blow to the end of the run; the child that survives is given 5 s to leave by itself."""
ORPHANED_S = 20.0
"""From the death of the controller to that of its children; those that still import torch notice it after that."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_llama(tmp_path_factory.mktemp("model"), max_tokens=64)


async def rollout(prompt: list[int], llm: LLM) -> float:
    completion = await llm.generate(prompt, max_new_tokens=8)
    return float(sum(completion.token_ids) % 3)


def make_pipeline(model: Path, folder: Path, *, engine_restarts: int = 0) -> Pipeline[list[int]]:
    """A run that goes on for hours."""
    (folder / "weights").mkdir(parents=True)
    return Pipeline(
        tasks=ListTasks([[3, 4], [5, 6, 7]]),
        rollout=rollout,
        engines=[EmbeddedEngine(model, capacity=8, cache_tokens=1024)],
        trainer=LocalTrainer(model),
        config=Config(steps=1_000_000, batch_size=2, group_size=2, engine_restarts=engine_restarts),
        parameter_server=SharedMemoryParameterServer(folder / "weights"),
        run_dir=folder / "run",
        progress=False,
    )


def has_trained(folder: Path) -> bool:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def children_of(process: psutil.Process, *modules: str) -> list[psutil.Process]:
    """The children that run one of ``modules``; all of staleflow's where none is named."""
    found = []
    for child in process.children():
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if any(f"-m staleflow.{module}" in command for module in modules or ("",)):
            found.append(child)
    return found


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [("engines.embedded_server", "engine-0", EngineError), ("trainer.rank", "trainer", TrainerError)],
    ids=["engine", "trainer"],
)
def test_killed_child_ends_the_run_with_its_name_and_signal(
    model: Path, tmp_path: Path, module: str, name: str, error: type[StaleflowError]
) -> None:
    pipeline = make_pipeline(model, tmp_path)

    async def main() -> float:
        running = asyncio.create_task(pipeline.run())
        async with asyncio.timeout(START_S):
            while not has_trained(tmp_path):
                await asyncio.sleep(0.05)
                assert not running.done()
        [child] = children_of(psutil.Process(), module)
        with (tmp_path / "run" / "logs" / f"{name}.log").open("a") as log:
            log.write("the last thing it said\n")
        child.kill()
        struck_s = time.monotonic()
        with pytest.raises(
            error, match=rf"(?s)^{name} \(pid {child.pid}\) was ended by SIGKILL.*the last thing it said"
        ):
            await running
        return time.monotonic() - struck_s

    assert asyncio.run(main()) < END_S
    assert children_of(psutil.Process()) == []
    assert list((tmp_path / "weights").iterdir()) == []
    if name == "engine-0":
        # What was learnt is not lost with the engine.
        load(tmp_path / "run" / "checkpoint")


@pytest.mark.timeout(400)
def test_killed_engine_is_started_again_and_serves_a_published_version(model: Path, tmp_path: Path) -> None:
    pipeline = make_pipeline(model, tmp_path, engine_restarts=1)

    def came_back() -> bool:
        events = read_events(tmp_path / "run")
        restarted = [event.t for event in events if isinstance(event, EngineRestarted)]
        return any(isinstance(event, Published) and event.t > restarted[0] for event in events if restarted)

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        async with asyncio.timeout(3 * START_S):
            for happened in (partial(has_trained, tmp_path), came_back):
                while not happened():
                    await asyncio.sleep(0.05)
                    assert not running.done()
                [child] = children_of(psutil.Process(), "engines.embedded_server")
                child.kill()
            with pytest.raises(EngineError, match=rf"engine-0 \(pid {child.pid}\) was ended by SIGKILL"):
                await running

    asyncio.run(main())
    assert not [event for event in read_events(tmp_path / "run") if isinstance(event, Failed)]
    assert children_of(psutil.Process()) == []


class Controller:
    """A controller in a process of its own, as a user starts one."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(model), str(folder)],
            env=environment,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
        )
        self.children: list[psutil.Process] = []

    def wait_for_children(self) -> None:
        until(self._has_children, START_S, "two children")

    def wait_for_step(self) -> None:
        self.wait_for_children()
        until(lambda: has_trained(self.folder), START_S, "a train step")

    def wait_for_exit(self) -> int:
        return self.process.wait(END_S)

    def childless(self) -> bool:
        return not any(lives(child) for child in self.children)

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for child in self.children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self.output.close()

    def _has_children(self) -> bool:
        assert self.process.poll() is None, self.said()
        self.children = children_of(psutil.Process(self.process.pid))
        return len(self.children) == 2


@pytest.fixture
def controller(model: Path, tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(model, tmp_path)
    yield controller
    controller.close()


def test_children_of_a_killed_controller_exit_by_themselves(controller: Controller) -> None:
    controller.wait_for_step()
    controller.process.kill()
    until(controller.childless, ORPHANED_S, "the children have exited")


def test_interrupt_ends_the_run_in_order_with_a_checkpoint(controller: Controller) -> None:
    controller.wait_for_step()
    controller.process.send_signal(signal.SIGINT)
    assert controller.wait_for_exit() == 130, controller.said()
    assert controller.childless()
    assert list((controller.folder / "weights").iterdir()) == []
    load(controller.folder / "run" / "checkpoint")
    for line in (controller.folder / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    assert "Traceback" not in controller.said()


def test_interrupt_while_starting_leaves_no_child(controller: Controller) -> None:
    controller.wait_for_children()
    controller.process.send_signal(signal.SIGINT)
    assert controller.wait_for_exit() == 130, controller.said()
    until(controller.childless, ORPHANED_S, "the children have exited")
    assert list((controller.folder / "weights").iterdir()) == []
    assert not (controller.folder / "run" / "checkpoint").exists()


if __name__ == "__main__":
    from staleflow import run

    # A shell without job control has told its background processes to ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(make_pipeline(Path(sys.argv[1]), Path(sys.argv[2])))
