"""The echo of a terminal: off and back, and nothing where there is no terminal."""

from __future__ import annotations

import io
import os
import pty
import termios

import pytest

from termgen.system import terminal_echo
from termgen.system.terminal_echo import hide_typing, show_typing


def test_the_echo_is_put_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    main, side = pty.openpty()
    with os.fdopen(side) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(side)
        assert before[3] & termios.ECHO
        hide_typing()
        assert termios.tcgetattr(side)[3] == before[3] & ~termios.ECHO
        show_typing()
        assert termios.tcgetattr(side) == before
        hide_typing()
        os.close(main)  # the terminal is gone
        show_typing()
        show_typing()


def test_without_a_terminal_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(write)
    with os.fdopen(read) as pipe:
        for stdin in (io.StringIO("text"), pipe):
            monkeypatch.setattr("sys.stdin", stdin)
            hide_typing()
            assert terminal_echo._before is None
            show_typing()
            assert stdin.read() in ("text", "")
