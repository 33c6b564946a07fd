import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from staleflow.errors import ConfigError, WeightsError
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer

PATIENCE_S = 30.0


def publish(server: SharedMemoryParameterServer, version: int) -> None:
    with server.publishing(version) as weights:
        (weights / "a.safetensors").write_text(f"weights of {version}")


def test_published_weights_can_be_pulled(tmp_path: Path) -> None:
    server = SharedMemoryParameterServer(tmp_path)
    publish(server, 1)
    with server.pulling(1) as weights:
        assert (weights / "a.safetensors").read_text() == "weights of 1"
    server.close()


def test_only_the_newest_versions_are_kept(tmp_path: Path) -> None:
    server = SharedMemoryParameterServer(tmp_path, keep=2)
    for version in range(1, 6):
        publish(server, version)
    assert server.versions == (4, 5)
    with pytest.raises(KeyError, match="version 3 cannot be pulled"), server.pulling(3):
        pass
    server._wait_for_removals()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    server.close()


class SlowRemoval:
    """Stands in for ``shutil.rmtree``: version 1 goes only when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self._rmtree = shutil.rmtree
        monkeypatch.setattr(shutil, "rmtree", self)

    def __call__(self, path: Path, *, ignore_errors: bool) -> None:
        if path.name == "1":
            assert self.may_go.wait(PATIENCE_S)
        self._rmtree(path, ignore_errors=ignore_errors)


def test_removal_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removal = SlowRemoval(monkeypatch)
    server = SharedMemoryParameterServer(tmp_path)
    for version in range(1, 6):
        publish(server, version)
    assert server.versions == (4, 5)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5
    removal.may_go.set()
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_space_that_a_removal_is_about_to_free_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removal = SlowRemoval(monkeypatch)
    server = SharedMemoryParameterServer(tmp_path)
    for version in range(1, 4):
        publish(server, version)
    usage = shutil.disk_usage(tmp_path)

    def nearly_full(path: Path) -> object:
        free = 0 if (path / "1").exists() else usage.free
        removal.may_go.set()
        return usage._replace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    publish(server, 4)
    assert server.versions == (3, 4)
    server.close()


def test_version_stays_while_it_is_pulled(tmp_path: Path) -> None:
    server = SharedMemoryParameterServer(tmp_path)
    publish(server, 1)
    with server.pulling(1) as weights:
        with server.pulling(1):
            for version in range(2, 6):
                publish(server, version)
        assert (weights / "a.safetensors").read_text() == "weights of 1"
    assert server.versions == (4, 5)
    server.close()


@pytest.mark.parametrize("version", [1, 2])
def test_versions_must_increase(tmp_path: Path, version: int) -> None:
    server = SharedMemoryParameterServer(tmp_path)
    publish(server, 2)
    with pytest.raises(ConfigError, match=f"version {version} published after version 2"):
        publish(server, version)
    server.close()


def test_V11_failed_publication_leaves_nothing(tmp_path: Path) -> None:
    server = SharedMemoryParameterServer(tmp_path)

    def fail() -> None:
        with server.publishing(1) as weights:
            (weights / "a.safetensors").write_text("half of")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fail()
    assert server.versions == ()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]
    publish(server, 1)
    server.close()


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    server = SharedMemoryParameterServer(tmp_path)
    publish(server, 1)
    server.close()
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_controller_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from staleflow.parameter_server.shared_memory import SharedMemoryParameterServer
server = SharedMemoryParameterServer(Path({str(tmp_path)!r}))
with server.publishing(1) as weights:
    (weights / "a.safetensors").write_text("weights")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    alive = SharedMemoryParameterServer(tmp_path)
    publish(alive, 1)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    another = SharedMemoryParameterServer(tmp_path)
    with alive.pulling(1) as weights:
        assert (weights / "a.safetensors").read_text() == "weights of 1", (
            "the folder of a living controller was taken for an orphan"
        )
    another.close()
    alive.close()
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_let_alone(tmp_path: Path) -> None:
    for name in ("staleflow-of-somebody", "other"):
        (tmp_path / name).mkdir()
    with (tmp_path / "other" / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        SharedMemoryParameterServer(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "staleflow-of-somebody"]


@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_too_few_versions_to_keep_are_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match=f"keep is {keep}"):
        SharedMemoryParameterServer(tmp_path, keep=keep)
    assert list(tmp_path.iterdir()) == []


def test_version_that_will_not_fit_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SharedMemoryParameterServer(tmp_path)
    publish(server, 1)
    full = shutil.disk_usage(tmp_path)._replace(free=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(
        WeightsError, match=r"version 2 cannot be published: the one before takes 0 MB, and .* 0 MB left"
    ):
        publish(server, 2)
    assert server.versions == (1,)
    monkeypatch.undo()
    publish(server, 2)
    server.close()


def test_disk_that_is_full_while_publishing_leaves_nothing_of_the_version(tmp_path: Path) -> None:
    server = SharedMemoryParameterServer(tmp_path)

    def publish_until_full() -> None:
        with server.publishing(1) as weights:
            (weights / "a.safetensors").write_text("half of the weights")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(WeightsError, match=r"version 1 cannot be published in .*No space left on device"):
        publish_until_full()
    assert server.versions == ()
    assert [path.name for path in tmp_path.glob("*/*")] == ["lock"]
    publish(server, 1)
    server.close()
