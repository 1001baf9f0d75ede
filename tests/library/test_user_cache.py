"""Entries of the user's cache: whole, of this user alone, and never in the way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from termgen.library.user_cache import UserCache, digest

CACHE = UserCache("things", most_entries=3)
needs_owners = pytest.mark.skipif(os.name != "posix", reason="files have owners on POSIX only")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_entry_is_read_back() -> None:
    assert CACHE.read("a") is None
    CACHE.write("a", b"one")
    CACHE.write("b", b"")
    assert CACHE.read("a") == b"one" and CACHE.read("b") == b""
    CACHE.write("a", b"two")
    assert CACHE.read("a") == b"two"
    assert sorted(os.listdir(CACHE.folder)) == ["a", "b"], "no part of a file is left"


@needs_owners
def test_folder_and_entries_are_private() -> None:
    CACHE.write("a", b"one")
    assert stat.S_IMODE(CACHE.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((CACHE.folder / "a").stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 40])
def test_a_damaged_entry_is_missing_and_written_anew(damage: bytes) -> None:
    CACHE.write("a", b"one")
    (CACHE.folder / "a").write_bytes(damage)
    assert CACHE.read("a") is None
    CACHE.write("a", b"one")
    assert CACHE.read("a") == b"one"


@needs_owners
@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
@pytest.mark.parametrize("which", ["folder", "entry"])
def test_what_others_can_write_is_not_read(bit: int, which: str) -> None:
    CACHE.write("a", b"one")
    path = CACHE.folder if which == "folder" else CACHE.folder / "a"
    path.chmod(path.stat().st_mode | bit)
    assert CACHE.read("a") is None


@needs_owners
def test_what_another_user_owns_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    CACHE.write("a", b"one")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert CACHE.read("a") is None
    CACHE.write("b", b"two")
    assert os.listdir(CACHE.folder) == ["a"], "nor is anything written there"


@needs_owners
def test_links_are_not_followed(tmp_path: Path) -> None:
    CACHE.write("a", b"one")
    CACHE.folder.rename(tmp_path / "elsewhere")
    CACHE.folder.symlink_to(tmp_path / "elsewhere")
    assert CACHE.read("a") is None
    CACHE.folder.unlink()
    CACHE.write("b", b"two")
    (CACHE.folder / "a").symlink_to(tmp_path / "elsewhere" / "a")
    assert CACHE.read("a") is None


def test_a_cache_that_cannot_be_written_is_left_alone(root: Path) -> None:
    root.write_text("a file where the folder should be")
    CACHE.write("a", b"one")
    assert CACHE.read("a") is None and root.is_file()


def test_the_oldest_entries_go() -> None:
    for age, name in enumerate("abcd"):
        CACHE.write(name, name.encode())
        os.utime(CACHE.folder / name, (1000 + age, 1000 + age))
    CACHE.write("e", b"e")
    assert sorted(os.listdir(CACHE.folder)) == ["c", "d", "e"]


def test_names_tell_all_parts_apart() -> None:
    parts: list[tuple[object, ...]] = [("ab", "c"), ("a", "bc"), ("abc",), (b"abc",), ("ab", b"c")]
    assert len({digest(*each) for each in parts}) == len(parts)
    assert digest("a", 1) == digest("a", 1)
