import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from staleflow import ListTasks, read_jsonl
from staleflow.errors import ConfigError, TaskSourceError


class Problem(msgspec.Struct):
    question: str
    answer: int


def handed_out(source: ListTasks[str], limit: int = 1000) -> list[tuple[int, str]]:
    def tasks() -> Iterator[tuple[int, str]]:
        for _ in range(limit):
            task = asyncio.run(source.next())
            if task is None:
                return
            yield task.id, task.data

    return list(tasks())


def test_every_epoch_has_every_item_in_another_order() -> None:
    tasks = handed_out(ListTasks(list("abcdefgh"), epochs=3))
    assert [number for number, _ in tasks] == list(range(24))
    epochs = ["".join(item for _, item in tasks[start : start + 8]) for start in (0, 8, 16)]
    assert all(sorted(epoch) == list("abcdefgh") for epoch in epochs)
    assert len(set(epochs)) == 3


def test_order_depends_on_the_seed_alone() -> None:
    def order(seed: int | None) -> list[tuple[int, str]]:
        return handed_out(ListTasks(list("abcdefgh"), epochs=2, seed=seed))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert [item for _, item in order(None)] == list("abcdefgh") * 2


@pytest.mark.parametrize("cursor", [0, 3, 8, 13, 16, 99])
def test_cursor_goes_on_where_another_source_stopped(cursor: int) -> None:
    whole = handed_out(ListTasks(list("abcdefgh"), epochs=2))
    assert handed_out(ListTasks(list("abcdefgh"), epochs=2, cursor=cursor)) == whole[cursor:]


def test_source_without_end_goes_on() -> None:
    assert len(handed_out(ListTasks(["a"]), limit=50)) == 50


def test_exhausted_source_stays_exhausted() -> None:
    source = ListTasks(["a"], epochs=1)
    assert len(handed_out(source)) == 1
    assert handed_out(source) == []


def test_empty_source_is_refused() -> None:
    with pytest.raises(TaskSourceError, match="at least one task"):
        ListTasks([])


@pytest.mark.parametrize(
    ("name", "arguments"), [("epochs", {"epochs": 0}), ("epochs", {"epochs": -1}), ("cursor", {"cursor": -1})]
)
def test_setting_out_of_range_is_named(name: str, arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -?[01]"):
        ListTasks(["a"], **arguments)


# -- task files --------------------------------------------------------------------------------------------------


def write(folder: Path, content: bytes) -> Path:
    path = folder / "tasks.jsonl"
    path.write_bytes(content)
    return path


def test_well_formed_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "1+1", "answer": 2}\n\n  \n{"question": "é\u2028", "answer": 3}\r\n'.encode())
    assert read_jsonl(path, Problem) == [Problem("1+1", 2), Problem("é\u2028", 3)]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (b'{"question": "2+2", "answer": "4"}', r"\$\.answer"),
        (b'{"question": "2+2"}', "answer"),
        (b'{"question": "2+2", "answer": 4', "truncated|malformed"),
        (b"[1, 2]", "object"),
        (b"null", "object"),
        (b'{"question": "\xff", "answer": 4}', "UTF-8|utf-8"),
    ],
    ids=["wrong type", "missing field", "cut off", "not an object", "null", "not text"],
)
def test_malformed_task_names_file_line_and_field(tmp_path: Path, line: bytes, names: str) -> None:
    path = write(tmp_path, b'{"question": "1+1", "answer": 2}\n\n' + line + b"\n")
    with pytest.raises(TaskSourceError, match=rf"{path}, line 3: .*({names})"):
        read_jsonl(path, Problem)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_file_without_tasks_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    with pytest.raises(TaskSourceError, match=f"{path} holds no task"):
        read_jsonl(path, Problem)


def test_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(TaskSourceError, match=r"absent\.jsonl cannot be read: No such file"):
        read_jsonl(tmp_path / "absent.jsonl", Problem)
    with pytest.raises(TaskSourceError, match="cannot be read: Is a directory"):
        read_jsonl(tmp_path, Problem)
