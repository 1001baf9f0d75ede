"""Copying says what has happened: a program took the text, or the terminal was only asked."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script
from tui_harness import FrozenApp, ask, chat_engine, pieces, ready, wait_until

CODE = "```python\nprint(1)\n```\n"
ASKED = "sent to the terminal; it may refuse"


def said(app: FrozenApp) -> list[str]:
    return [note.message for note in app._notifications]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that were sent to the terminal for its clipboard."""
    found: list[str] = []

    def write(_driver: Any, data: str) -> None:
        head, osc, rest = data.partition("\x1b]52;c;")
        if osc:
            found.append(base64.b64decode(rest.rstrip("\a")).decode())

    monkeypatch.setattr("textual.drivers.headless_driver.HeadlessDriver.write", write)
    return found


@pytest.mark.parametrize("status", [0, 1])
async def test_the_notice_names_the_program_or_doubts_the_terminal(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    kept = tmp_path / "kept"
    (tmp_path / "xclip").write_text(f"#!/bin/sh\ncat > {kept}\nexit {status}\n")
    (tmp_path / "xclip").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DISPLAY", ":0")
    for name in ("SSH_TTY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    effect = "copied by xclip" if status == 0 else ASKED
    app = FrozenApp(chat_engine(Script(pieces=pieces(CODE))))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "how?")
        await ask(app, pilot, "/copy", wait=False)
        await wait_until(pilot, lambda: f"answer {effect}" in said(app))
        assert kept.read_text() == CODE and written == ([] if status == 0 else [CODE])
        await pilot.press("alt+1")
        await wait_until(pilot, lambda: f"code block 1 {effect}" in said(app))
        assert kept.read_text() == "print(1)\n" == app.clipboard


async def test_without_programs_every_copy_asks_the_terminal(written: list[str]) -> None:
    app = FrozenApp(chat_engine(Script(pieces=pieces("See https://a.example/x now."))))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "where?")
        await pilot.press("alt+o")
        await pilot.pause()
        await pilot.press("y")
        await wait_until(pilot, lambda: f"https://a.example/x {ASKED}" in said(app))
        app.chat.prompt.insert("a draft")
        app.chat.prompt.select_all()
        await pilot.press("ctrl+c")
        await wait_until(pilot, lambda: f"selection {ASKED}" in said(app))
        await pilot.press("ctrl+x")
        await wait_until(pilot, lambda: len(written) == 3)
        assert written == ["https://a.example/x", "a draft", "a draft"] and len(said(app)) == 2
