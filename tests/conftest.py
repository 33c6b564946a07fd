"""Fixtures of all tests."""

import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import pytest
from support import Parts, Scripted, ScriptedRun, Spawn
from tiny_child import Reply

from staleflow import Config
from staleflow.errors import EngineError
from staleflow.process import Child


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The tests' models are too small for two, and threads that wait for a busy core spin."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    """Make pipelines on scripted parts; see :class:`support.ScriptedRun`."""
    numbers = itertools.count(1)

    def make(config: Config, **parts: Unpack[Parts]) -> ScriptedRun:
        return ScriptedRun(config, tmp_path / f"scripted-{next(numbers)}", **parts)

    return make


@pytest.fixture
def importable_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``python -m`` in a child find the modules beside this file."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent)]))


@pytest.fixture
def spawn(importable_children: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Spawn:
    """Start a child that behaves as told; see ``tiny_child``."""

    async def start(behaviour: str) -> Child[Reply]:
        monkeypatch.setenv("TINY_CHILD", behaviour)
        return await Child.spawn(
            "engine-0", "tiny_child", log_path=tmp_path / "engine-0.log", receives=Reply, error=EngineError
        )

    return start


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port of this machine where nobody listens, and nobody can begin to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])
