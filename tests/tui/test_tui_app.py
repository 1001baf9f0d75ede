"""The app around the screens: starting, failing to start, keys, help, themes, ending."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tui_harness import FrozenApp, ask, chat_engine, ready, shipped_themes, wait_until

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.errors import ModelNotFoundError
from termgen.tui.app import TermgenApp
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.state.commands import COMMANDS
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.help import HelpScreen
from termgen.tui.loading import LoadingScreen
from termgen.tui.paint.canvas import Canvas


async def test_loading_shows_the_phases_until_the_engine_is_there() -> None:
    go_on = asyncio.Event()

    async def start(report: Callable[[str, float], None]) -> EngineClient:
        await asyncio.to_thread(report, "fetching", 1.0)
        await asyncio.to_thread(report, "loading weights", 0.25)
        await go_on.wait()
        return chat_engine()

    async def stop() -> None:
        pass

    app = TermgenApp(start, stop_engine=stop, ui=UIConfig(), theme_folders=(shipped_themes(),))
    async with app.run_test(size=(80, 24)) as pilot:
        assert isinstance(app.screen, LoadingScreen)
        canvas = app.screen.query_one(Canvas)
        await wait_until(pilot, lambda: "25%" in canvas.text)
        assert "✓ fetching" in canvas.text and "● loading weights" in canvas.text
        await pilot.press("f2")
        assert isinstance(app.screen, LoadingScreen), "nothing to show yet"
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        go_on.set()
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await pilot.pause()
        shown = canvas.text
        await asyncio.sleep(0.3)
        # while the chat is shown, its clock is stopped and costs nothing
        assert canvas.text == shown


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ModelNotFoundError("no model 'x':\n see `termgen models`"), "no model 'x': see"),
        (RuntimeError("boom"), "the engine could not start: RuntimeError: boom"),
    ],
)
async def test_a_failed_start_is_one_line_and_exit_code_2(error: Exception, line: str) -> None:
    stopped = []

    async def start(_report: Callable[[str, float], None]) -> EngineClient:
        raise error

    async def stop() -> None:
        stopped.append(True)

    app = TermgenApp(start, stop_engine=stop, ui=UIConfig(), theme_folders=(shipped_themes(),))
    messages: list[str] = []
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app._exit)
        messages = [str(message) for message in app._exit_renderables]
    assert app.return_code == 2
    assert len(messages) == 1 and messages[0].startswith(f"termgen: error: {line}")
    assert "\n" not in messages[0]
    assert stopped == [True]


async def test_quitting_while_loading_stops_the_engine() -> None:
    stopped = []

    async def start(_report: Callable[[str, float], None]) -> EngineClient:
        await asyncio.Event().wait()
        raise AssertionError

    async def stop() -> None:
        stopped.append(True)

    app = TermgenApp(start, stop_engine=stop, ui=UIConfig(), theme_folders=(shipped_themes(),))
    async with app.run_test() as pilot:
        await pilot.press("ctrl+q")
    assert stopped == [True] and app.return_code == 0


async def test_keys_change_between_chat_and_engine() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press("f2")
        assert isinstance(app.screen, DashboardScreen)
        await pilot.press("1")
        assert isinstance(app.screen, ChatScreen)
        await pilot.press("2")  # in the prompt it is text
        assert app.chat.prompt.text == "2"
        await pilot.press("tab", "2")
        assert app.chat.prompt.text == "22", "tab does not leave it"


async def test_the_conversation_survives_a_look_at_the_engine() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        await pilot.press("f2", "f2")
        assert "▎ why" in app.chat.transcript.plain_text


async def test_help_lists_every_key_and_command() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        await pilot.pause()
        text = app.screen.query_one(Canvas).text
        for expected in ("Send the message", "ctrl+j", "esc", "ctrl+q", "Freeze or go on live"):
            assert expected in text
        for command in COMMANDS:
            assert f"/{command.name}" in text
        await pilot.press("escape")
        assert isinstance(app.screen, ChatScreen)


async def test_every_action_is_in_the_palette() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        names = {command.title for command in app.get_system_commands(app.screen)}
        assert {
            "Answer: Stop",
            "Chat: Clear",
            "Chat: New",
            "Answer: Retry",
            "Answer: Copy answer",
            "Model: System prompt",
            "Model: Engine",
            "Screen: Help",
            "Screen: Theme",
            "Screen: Screenshot",
            "Screen: Quit",
        } <= names
        await pilot.press("f2")
        names = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Pause", "Live", "Chat"} <= names


async def test_a_palette_command_runs() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        await pilot.press("ctrl+p")
        await pilot.pause(0.2)
        await pilot.press(*"clear")
        await pilot.pause(0.3)
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await wait_until(pilot, lambda: "is ready" in app.chat.transcript.plain_text)


async def test_the_chosen_theme_is_used_and_changed() -> None:
    app = FrozenApp(chat_engine(), ui=UIConfig(theme="termgen-light"))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        assert app.theme == "termgen-light"
        await ask(app, pilot, "/theme termgen-contrast")
        assert app.theme == "termgen-contrast"
        await ask(app, pilot, "/theme nonsense")
        assert app.theme == "termgen-contrast"
        assert "No theme 'nonsense'" in app.chat.transcript.plain_text


async def test_a_broken_theme_file_is_reported_and_the_old_theme_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\n[colors]\nprimary = "#xyz"\n')
    app = FrozenApp(
        chat_engine(),
        ui=UIConfig(theme="mine"),
        theme_folders=(shipped_themes(), tmp_path),
    )
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await ready(app, pilot)
        assert app.theme == "termgen-dark"
        messages = [notification.message for notification in app._notifications]
        assert any("mine.toml: [colors] primary: '#xyz' is not a colour" in m for m in messages)
        assert any("no theme 'mine'" in m for m in messages)


async def test_ctrl_c_copies_a_selection_in_the_prompt() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press(*"hello", "shift+home", "ctrl+c")
        assert app.clipboard == "hello"
        assert not app._exit


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="needs POSIX signals")
async def test_sigterm_ends_the_app_cleanly() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test() as pilot:
        await ready(app, pilot)
        os.kill(os.getpid(), signal.SIGTERM)
        await wait_until(pilot, lambda: app._exit)
    assert app.stopped == 1 and app.return_code == 0


async def test_the_engine_is_stopped_once_when_the_app_ends() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test() as pilot:
        await ready(app, pilot)
        await pilot.press("ctrl+q")
    assert app.stopped == 1
