"""Mistyped commands and files that are not there are asked about before anything is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chat_harness import sent
from fake_engine import FakeEngine, Script
from tui_harness import FrozenApp, ask, chat_engine, ready, wait_until

from termgen.tui.app import TermgenApp
from termgen.tui.chat.state.doubts import Doubts


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("x = 1\n")
    (tmp_path / "two words.txt").write_text("hello\n")
    (tmp_path / "src").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        ("/sytem be brief", "there is no command /sytem, but /system"),
        ("/claer", "there is no command /claer, but /clear"),
        ("  /System x", "there is no command /System, but /system"),
        ("/xyzzy", "there is no command /xyzzy"),
        ("/system\nbe brief", "/system is a command only with its argument in the same line"),
        ("read @missing.py", "there is no file missing.py"),
        ("read @src/gone, and @here.py.", "there is no file src/gone"),
        ("what is @src/?", "there is no file src/"),
        ('and @"no such file"', "there is no file no such file"),
        ("@a.b @a.c @a.d @a.e @a.b", "there is no file a.b, a.c, a.d and 1 more"),
        ("/x of @gone.txt", "there is no command /x; there is no file gone.txt"),
    ],
)
def test_what_is_doubted_once(text: str, doubt: str) -> None:
    doubts = Doubts()
    assert doubts.about(text) == doubt
    assert doubts.about(text) == "", "it is to be sent"
    assert doubts.about(text) == doubt, "another time is another message"


@pytest.mark.parametrize(
    "text",
    [
        *("/etc/passwd is a file", "a /b", "// no", "/", "5 @ 3.50", "me@example.org"),
        *("see @here.py, please", '@"two words.txt"', "ask @nobody", "@dataclass\nclass A: ..."),
    ],
)
def test_what_is_text(text: str) -> None:
    assert Doubts().about(text) == ""


@pytest.mark.parametrize(
    ("text", "words"), [("/sytem be brief", "but /system"), ("why @gone.py", "no file gone.py")]
)
async def test_nothing_is_sent_before_the_answer(text: str, words: str) -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, text, wait=False)
        assert app.chat.prompt.text == text and not engine.calls
        assert any(words in note.message for note in app._notifications)
        assert "⏎ sends it as it is" in str(app.chat.prompt.border_subtitle)
        await pilot.press("backspace")
        await pilot.pause()
        assert "⏎ sends it as it is" not in str(app.chat.prompt.border_subtitle)
        app.chat.prompt.insert(text[-1])
        await pilot.press("enter")
        await wait_until(pilot, lambda: bool(engine.calls))
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert sent(engine) == [("user", text)] and app.chat.prompt.text == ""


async def test_the_border_lists_the_files_that_are_named() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        app.chat.prompt.insert('@here.py and @gone.py and @"two words.txt"')
        await pilot.pause()
        assert app.chat.prompt.border_title == "▤ here.py 6B  ▤ two words.txt 6B"
        await ask(app, pilot, "/attach here.py")
        app.chat.prompt.text = "again @here.py"
        await pilot.pause()
        assert app.chat.prompt.border_title == "▤ here.py 6B", "once"
        app.chat.prompt.text = "@nothing here.py"
        await ask(app, pilot, "/attach off")
        await pilot.pause()
        assert not app.chat.prompt.border_title


async def test_they_are_asked_about_while_the_model_loads_too() -> None:
    loaded = asyncio.Event()
    engine = chat_engine(Script(pieces=("ok",)))

    class Slow(FrozenApp):
        async def _give(self, _report: object) -> FakeEngine:
            await loaded.wait()
            return engine

    app: TermgenApp = Slow(engine)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        area = app._loading.area
        assert area is not None
        area.prompt.insert("/sytem be brief")
        await pilot.press("enter")
        assert area.prompt.text == "/sytem be brief" and not area.waiting
        await pilot.press("enter")
        await pilot.pause()
        assert [message.text for message in area.waiting] == ["/sytem be brief"]
        loaded.set()
        await wait_until(pilot, lambda: bool(engine.calls))
        assert sent(engine)[-1] == ("user", "/sytem be brief")
