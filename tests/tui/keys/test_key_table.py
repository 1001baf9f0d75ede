"""Every key of the app's own table, sent as bytes to a pseudo-terminal without the kitty protocol.

Pilot's keys carry no characters, so that it cannot see a key that is typed as well.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from textual.actions import parse
from textual.binding import Binding

from termgen.tui import actions
from termgen.tui.app import TermgenApp

LIMIT_S = 30.0
ACTION_S = 3.0
HARNESS = Path(__file__).parents[2] / "harness"
SCENES = ("prompt", "browse", "chats", "engine", "help", "themes", "models", "tokens", "links")
SCENES += (
    "sampling",
    "system prompt",
    "earlier prompts",
    "kept prompts",
    "find",
    "tree",
    "beside",
    "context",
    "approval",
    "silent",
    "bench",
    "bench's engine",
    "servers",
)
"""What is shown for each of the app's scopes, in their order."""
TYPING = {"prompt", "chats"}
"""Scenes that take a letter as text, whatever it is bound to elsewhere."""

FIELD_ACTIONS = {"sampling.apply": "submit"}
"""Actions of fields that lead to those of a binding."""

ARROWS = {"up": "A", "down": "B", "right": "C", "left": "D"}
F5_TO_F12 = (15, 17, 18, 19, 20, 21, 23, 24)
ALT = {f"alt+{key}": f"\x1b{key}" for key in "abcdefghijklmnopqrstuvwxyz123456789"}
CTRL = {f"ctrl+{key}": chr(ord(key) - 96) for key in "abcdefghijklmnopqrstuvwxyz"}
XTERM = {
    **{key: value for key, value in ALT.items() if key not in ("alt+b", "alt+f")},
    **{key: value for key, value in CTRL.items() if key not in ("ctrl+i", "ctrl+m", "ctrl+h")},
    **{key: key for key in "abcdefghijklmnopqrstuvwxyzGHL1234567890"},
    **{f"f{n}": f"\x1bO{'PQRS'[n - 1]}" for n in range(1, 5)},
    **{f"f{n}": f"\x1b[{code}~" for n, code in zip(range(5, 13), F5_TO_F12, strict=True)},
    **{key: f"\x1b[{end}" for key, end in ARROWS.items()},
    **{f"shift+{key}": f"\x1b[1;2{end}" for key, end in ARROWS.items()},
    **{f"alt+{key}": f"\x1b[1;3{end}" for key, end in ARROWS.items()},
    **{f"ctrl+{key}": f"\x1b[1;5{end}" for key, end in ARROWS.items()},
    "home": "\x1b[H",
    "end": "\x1b[F",
    "pageup": "\x1b[5~",
    "pagedown": "\x1b[6~",
    "shift+pageup": "\x1b[5;2~",
    "shift+pagedown": "\x1b[6;2~",
    "delete": "\x1b[3~",
    "escape": "\x1b",
    "enter": "\r",
    "tab": "\t",
    "alt+enter": "\x1b\r",
    "alt+0": "\x1b0",
    "alt+shift+r": "\x1bR",
    "space": " ",
    "slash": "/",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
}
"""Bytes of each key by its name. Keys that xterm sends as another one are left out."""


class Case(NamedTuple):
    scene: str
    key: str
    binding: Binding


def cases() -> Iterator[Case]:
    for scene, scope in zip(SCENES, actions.scopes(TermgenApp.BINDINGS), strict=True):
        for binding in scope.bindings:
            assert isinstance(binding, Binding)
            yield from (Case(scene, key, binding) for key in binding.key.split(","))


class Recorded:
    """The app in its pseudo-terminal."""

    def __init__(self) -> None:
        main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        orders, self._orders = os.pipe()
        self._reports, reports = os.pipe()
        kitty = ("KITTY_WINDOW_ID", "TERM_PROGRAM", "TMUX", "COLUMNS", "LINES")
        kept = {key: value for key, value in os.environ.items() if key not in kitty}
        self._child = subprocess.Popen(
            [sys.executable, str(HARNESS / "recording_app.py"), str(orders), str(reports)],
            stdin=side,
            stdout=side,
            stderr=side,
            pass_fds=(orders, reports),
            env=kept | {"TERM": "xterm-256color", "ESCDELAY": "20", "TEXTUAL_ANIMATIONS": "none"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        for end in (side, orders, reports):
            os.close(end)
        self._main, self._pending = main, b""
        self.output = b""
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        """Read what the app draws, which would hold it up otherwise."""
        try:
            while part := os.read(self._main, 65536):
                self.output += part
        except OSError:  # the app has ended
            return

    def report(self, limit_s: float) -> Any:
        """The next report; None where none comes in time."""
        while b"\n" not in self._pending:
            if not select.select([self._reports], [], [], limit_s)[0]:
                return None
            part = os.read(self._reports, 4096)
            assert part, f"the app has ended: {self.output[-2000:].decode(errors='replace')}"
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def show(self, scene: str) -> None:
        os.write(self._orders, scene.encode() + b"\n")
        assert self.report(LIMIT_S) == []

    def press(self, key: str) -> None:
        os.write(self._main, XTERM[key].encode())

    def typed(self) -> list[str]:
        """The texts of all fields."""
        os.write(self._orders, b"\n")
        found = self.report(LIMIT_S)
        assert isinstance(found, list)
        return found

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        for end in (self._main, self._orders, self._reports):
            os.close(end)


@pytest.fixture(scope="module")
def recorded() -> Iterator[Recorded]:
    app = Recorded()
    yield app
    app.close()


@pytest.mark.parametrize("case", list(cases()), ids=lambda c: f"{c.scene}-{c.binding.id}-{c.key}")
def test_each_key_calls_its_action_and_types_nothing(recorded: Recorded, case: Case) -> None:
    scene, key, binding = case
    assert key in XTERM, f"{key} of {binding.id} does not arrive from an xterm"
    recorded.show(scene)
    recorded.press(key)
    if scene in TYPING and len(XTERM[key]) == 1 and XTERM[key].isprintable():
        end = time.monotonic() + ACTION_S
        while not recorded.typed() and time.monotonic() < end:
            pass
        assert recorded.typed() == [XTERM[key]]
        return
    _, name, parameters = parse(FIELD_ACTIONS.get(binding.id or "", binding.action))
    assert recorded.report(ACTION_S) == [name, list(parameters)]
    assert recorded.typed() == []


@pytest.mark.parametrize("scene", SCENES)
def test_no_alt_key_types_its_letter(recorded: Recorded, scene: str) -> None:
    recorded.show(scene)
    for key in ("alt+u", "alt+0", "alt+shift+r"):
        recorded.press(key)
    recorded.press("ctrl+p")  # the palette's key acts everywhere: these were handled before it
    assert recorded.report(ACTION_S) == ["command_palette", []]
    assert recorded.typed() == []
