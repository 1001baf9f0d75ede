"""What one run leaves for the next: a file that several programs write, and that may be broken."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from termgen.system import remembered as remembered_module
from termgen.system.choices import Choices
from termgen.system.remembered import MAX_BYTES, Remembered

WRITER = """
import sys
from pathlib import Path
from termgen.system.remembered import Remembered
kept = Remembered(Path(sys.argv[1]))
for number in range(40):
    kept.write({f"{sys.argv[2]}{number}": number})
    assert not kept.fault, kept.fault
"""
BAD = {"cut": b"{", "list": b"[1]", "bytes": b"\xff", "deep": b"[" * 9000}
BAD["large"] = b" " * MAX_BYTES + b"{}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "choices.json"


def test_entries_are_there_again_and_private(path: Path) -> None:
    kept = Remembered(path)
    assert kept.read() == {} and kept.fault == ""
    kept.write({"theme": "a", "open": True})
    kept.write({"theme": None, "model": "ünï"})
    assert Remembered(path).read() == {"open": True, "model": "ünï"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".part"] == []


def test_programs_that_write_at_once_keep_each_others_entries(path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(path)]
    running = [subprocess.Popen([*command, name]) for name in "abc"]
    assert [child.wait(60) for child in running] == [0, 0, 0]
    assert len(Remembered(path).read()) == 120


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_file_that_is_no_object_is_one_line_and_is_kept_aside(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    kept = Remembered(path)
    assert kept.read() == {} and f"runs chose is not known: {path}" in kept.fault
    assert "\n" not in kept.fault and path.read_bytes() == content, "reading changes nothing"
    kept.write({"a": 1})
    assert kept.fault == "" and kept.read() == {"a": 1}
    assert path.with_name("choices.json.broken").read_bytes() == content


def test_a_pipe_in_its_place_is_not_waited_for(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    kept = Remembered(path)
    assert kept.read() == {} and "is no file" in kept.fault


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Remembered(tmp_path / "file" / "choices.json")
    kept.write({"a": 1})
    assert kept.fault.startswith("the choice is not kept: ") and "\n" not in kept.fault


def test_a_lock_that_is_held_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_module, "LOCK_S", 0.02)
    kept = Remembered(path)
    kept.write({"a": 1})
    with remembered_module._locked(path.with_name("choices.json.lock")):
        thread = threading.Thread(target=kept.write, args=({"a": 2},))
        thread.start()
        thread.join()
    assert kept.fault.startswith("the choice is not kept") and kept.read() == {"a": 1}


async def test_choices_are_written_once_each(path: Path) -> None:
    choices = Choices(Remembered(path))
    choices.change("theme", "one")
    choices.change("theme", "two")
    assert await choices.write() == "" and json.loads(path.read_text()) == {"theme": "two"}
    path.unlink()
    choices.change("theme", "two")
    assert await choices.write() == "" and not path.exists(), "nothing has changed"


def test_entries_of_another_kind_count_as_none(path: Path) -> None:
    Remembered(path).write({"theme": 3, "model": "x" * 9999, "chats_open": "yes"})
    choices = Choices(Remembered(path))
    assert not choices.text("theme") and not choices.text("model")
    assert not choices.is_on("chats_open")
    assert choices.fault == "" and Choices().text("theme") == ""
