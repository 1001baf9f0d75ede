"""The built-in tools: what they read, and that they read nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from termgen.tools import files
from termgen.tools.files import FileTools
from termgen.tools.toolbox import Toolbox, ToolError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "a.py").write_text("one\nTwo\nthree\n")
    (inside / "sub" / "b.txt").write_text("two too\n")
    (inside / ".git").mkdir()
    (inside / ".git" / "config").write_text("two in git\n")
    (inside / "empty").write_text("")
    (inside / "binary").write_bytes(b"two\0two")
    (tmp_path / "secret").write_text("two secrets\n")
    (tmp_path / "inside-not").mkdir()
    (inside / "leak").symlink_to(tmp_path / "secret")
    (inside / "out").symlink_to(tmp_path)
    return inside


async def use(folder: Path, name: str, **arguments: Any) -> str:
    tools = {tool.name: tool for tool in FileTools(folder).tools}
    return await tools[name].call(arguments)


async def test_list(folder: Path) -> None:
    assert (await use(folder, "list")).split("\n") == [
        ".git/",
        "a.py 14",
        "binary 7",
        "empty 0",
        "leak (link)",
        "out (link)",
        "sub/",
    ]
    assert await use(folder, "list", path="sub") == "b.txt 8"


async def test_read(folder: Path) -> None:
    assert await use(folder, "read", path="a.py") == "1: one\n2: Two\n3: three"
    part = await use(folder, "read", path="sub/../a.py", first_line=2, num_lines=1)
    assert part == "2: Two\n... lines 3 to 3 follow"
    assert await use(folder, "read", path="empty") == "The file is empty."
    assert await use(folder, "read", path=str(folder / "a.py"), num_lines=1) is not None


async def test_search(folder: Path) -> None:
    assert await use(folder, "search", text="two") == "a.py:2: Two\nsub/b.txt:1: two too"
    assert await use(folder, "search", text="two", names="*.txt") == "sub/b.txt:1: two too"
    assert await use(folder, "search", text="two", path="sub") == "sub/b.txt:1: two too"
    assert await use(folder, "search", text="t.o") == "No line has it.", "text, no expression"


@pytest.mark.parametrize(
    "path", ["..", "../secret", "leak", "out", "out/secret", "/etc/passwd", "../inside-not", "a\0b"]
)
@pytest.mark.parametrize("tool", ["list", "read", "search"])
async def test_nothing_outside_of_the_folder_is_read(folder: Path, tool: str, path: str) -> None:
    arguments = {"path": path} | ({"text": "two"} if tool == "search" else {})
    with pytest.raises(ToolError, match="^path: "):
        await use(folder, tool, **arguments)


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("read", {}, "path is missing"),
        ("read", {"path": 3}, "path must be text"),
        ("read", {"path": "a.py", "first_line": 0}, "first_line must be a whole number"),
        ("read", {"path": "a.py", "first_line": True}, "first_line must be a whole number"),
        ("read", {"path": "a.py", "first_line": 9}, "first_line: the file has 3 lines"),
        ("read", {"path": "a.py", "num_lines": 10**9}, "num_lines must be 2000 at most"),
        ("read", {"path": "a.py", "mode": "w"}, "there is no argument 'mode'"),
        ("read", {"path": "binary"}, "not text"),
        ("read", {"path": "sub"}, "Is a directory"),
        ("read", {"path": "nothing"}, "No such file"),
        ("list", {"path": "a.py"}, "Not a directory"),
        ("search", {"text": ""}, "1 to 200 characters"),
        ("search", {"text": "x" * 201}, "1 to 200 characters"),
    ],
)
async def test_bad_arguments_are_named(
    folder: Path, tool: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ToolError, match=words):
        await use(folder, tool, **arguments)


async def test_a_pipe_is_no_file_and_holds_nothing_up(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(ToolError, match="is not a file"):
        await asyncio.wait_for(use(folder, "read", path="pipe"), 5)
    assert "b.txt" in await asyncio.wait_for(use(folder, "search", text="two"), 5)


async def test_sizes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "long").write_text("x" * 300_000 + "\nend")
    assert len(await use(folder, "read", path="long")) < files.MAX_READ_CHARS + 100
    (folder / "many").write_text("two\n" * 1000)
    found = (await use(folder, "search", text="two", names="many")).split("\n")
    assert len(found) == files.MAX_FOUND + 1 and "more than" in found[-1]
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ToolError, match="more than"):
        await use(folder, "read", path="long")
    monkeypatch.setattr(files, "MAX_LISTED", 2)
    assert (await use(folder, "list")).split("\n")[2:] == ["... 7 more"]
    monkeypatch.setattr(files, "MAX_VISITED", 1)
    assert "stopped after 1 files" in await use(folder, "search", text="zzz")


async def test_a_cancelled_search_ends_its_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = 0
    visit = files._Limits.visit

    def slow(limits: files._Limits) -> None:
        nonlocal visits
        visits += 1
        time.sleep(0.01)
        visit(limits)

    monkeypatch.setattr(files._Limits, "visit", slow)
    for number in range(500):
        (folder / f"f{number}").write_text("")
    task = asyncio.create_task(use(folder, "search", text="two"))
    while not visits:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.1)
    seen = visits
    await asyncio.sleep(0.1)
    assert visits == seen < 100


async def test_it_is_a_provider(folder: Path) -> None:
    box = Toolbox([FileTools(folder)])
    box.start()
    await box.wait(1)
    names = [one.name for one in box.offered]
    assert names == ["files_list", "files_read", "files_search"] and not box.left_out
    assert str(folder) in box.providers[0].state
    await box.close()
