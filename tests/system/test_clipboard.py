"""Clipboard programs, all of them fakes: the order in which they are tried, and the notice."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from termgen.system import clipboard
from termgen.system.clipboard import copy_with_program, programs

X11, WAYLAND, TMUX = {"DISPLAY": ":0"}, {"WAYLAND_DISPLAY": "w"}, {"TMUX": "/t,1,0"}


def put(folder: Path, name: str, *, status: int = 0, rest: str = "") -> Path:
    """A program that keeps its input and arguments in a file; returns the file."""
    kept = folder / f"{name}.kept"
    script = folder / name
    script.write_text(f'#!/bin/sh\n{{ echo "$@"; cat; }} > {kept}\n{rest}\nexit {status}\n')
    script.chmod(0o755)
    return kept


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("variables", "platform", "names"),
    [
        ({}, "linux", []),
        (X11, "linux", ["xclip", "xsel"]),
        (WAYLAND | X11, "linux", ["wl-copy", "xclip", "xsel"]),
        (TMUX, "linux", ["tmux"]),
        (X11 | TMUX, "linux", ["xclip", "xsel", "tmux"]),
        (X11 | TMUX | {"SSH_TTY": "/dev/pts/1"}, "linux", ["tmux"]),
        (WAYLAND | {"SSH_CONNECTION": "a b"}, "linux", []),
        ({}, "darwin", ["pbcopy"]),
        ({"SSH_TTY": "/dev/ttys1"}, "darwin", []),
    ],
)
def test_programs_and_their_order(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], platform: str, names: list[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert [program.argv[0] for program in programs(variables)] == names


def test_the_first_that_works_gets_the_text(tmp_path: Path, environ: dict[str, str]) -> None:
    failed = put(tmp_path, "wl-copy", status=1)
    kept = put(tmp_path, "xsel")  # xclip is not there
    unused = put(tmp_path, "tmux")
    assert copy_with_program("ä\nb", environ | WAYLAND | X11 | TMUX) == "copied by xsel"
    assert failed.read_text().endswith("ä\nb")
    assert kept.read_text() == "--clipboard --input\nä\nb" and not unused.exists()


def test_tmux_sends_it_on(tmp_path: Path, environ: dict[str, str]) -> None:
    kept = put(tmp_path, "tmux")
    effect = copy_with_program("text", environ | TMUX)
    assert effect == "copied to tmux's buffer and sent to the terminal"
    assert kept.read_text() == "load-buffer -w -\ntext"
    put(tmp_path, "tmux", status=1)  # before 3.2 it has no -w
    assert copy_with_program("text", environ | TMUX) is None


def test_none_that_is_there_is_none(environ: dict[str, str]) -> None:
    assert copy_with_program("text", {"PATH": environ["PATH"].split(":")[0]} | X11 | TMUX) is None


def test_a_process_left_behind_or_hanging_holds_nothing_up(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "xclip", rest="sleep 3 &")  # xclip keeps the text for others this way
    began = time.monotonic()
    assert copy_with_program("text", environ | X11) == "copied by xclip"
    assert time.monotonic() - began < 2.0
    monkeypatch.setattr(clipboard, "LIMIT_S", 0.3)
    put(tmp_path, "xclip", rest="exec sleep 3")
    assert copy_with_program("text", environ | X11) is None
    assert time.monotonic() - began < 2.0
