"""The mouse: tabs, rows, the map, the footer, the lists and the wheel."""

from __future__ import annotations

import subprocess
import sys
import webbrowser
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_engine import Script
from textual import events
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import OptionList
from tui_harness import FrozenApp, ask, chat_engine, feed_dashboard, ready, wait_until

from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.help import HelpScreen
from termgen.tui.paint.canvas import Canvas
from termgen.tui.themes.theme_chooser import ThemeChooser


async def wheel(pilot: Pilot[Any], widget: Widget, *, down: bool) -> None:
    """Turn the wheel by one notch over the middle of a widget."""
    x, y = widget.region.center
    kind = events.MouseScrollDown if down else events.MouseScrollUp
    event = kind(widget, int(x), int(y), 0, 1, 0, False, False, False, int(x), int(y))
    pilot.app.screen._forward_event(event)
    await pilot.pause()


def line_of(canvas: Canvas, words: str) -> int:
    return next(i for i, line in enumerate(canvas.text.splitlines()) if words in line)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_tabs_rows_and_the_map_can_be_clicked(size: tuple[int, int]) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        table = app.screen.query_one("#requests", Canvas)
        y = line_of(table, "cmpl-77")
        await pilot.click("#requests", offset=(6, y))
        assert "▸ cmpl-77" in table.text and table.text.count("▸") == 1
        await pilot.click("#requests", offset=(6, 1))
        assert "▸ cmpl-77" in table.text, "the header is no request"
        await pilot.click("#requests", offset=(6, y))
        page = app.screen.query_one("#page", Canvas)
        await wait_until(pilot, lambda: "request cmpl-77" in page.text)  # it gets its size first
        assert page.display
        tabs = app.screen.query_one("#tabs", Canvas)
        for name in ("graphs", "overview"):
            await pilot.click("#tabs", offset=(tabs.text.index(name), 0))
            assert page.display == (name != "overview")
        await pilot.click("#blocks", offset=(5, 2))
        await wait_until(pilot, lambda: "KV blocks" in page.text)
        assert page.display


async def test_a_row_that_is_scrolled_to_is_the_one_that_is_clicked() -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press(*["down"] * 8)
        table = app.screen.query_one("#requests", Canvas)
        assert "chat-1" not in table.text
        y = line_of(table, "chatcmpl-b20")
        await pilot.click("#requests", offset=(6, y))
        assert "▸ chatcmpl-b20" in table.text


async def test_the_wheel_scrolls_the_transcript() -> None:
    script = Script(pieces=tuple(f"line {i}\n\n" for i in range(40)))
    app = FrozenApp(chat_engine(script))
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "many")
        transcript = app.chat.transcript
        end = transcript.scroll_offset.y
        await wheel(pilot, transcript, down=False)
        await wait_until(pilot, lambda: transcript.scroll_offset.y < end)
        for _ in range(4):
            await wheel(pilot, transcript, down=True)
        await wait_until(pilot, lambda: transcript.scroll_offset.y == end)


@dataclass
class Browser:
    """Replaces the browser that `webbrowser` finds, and the process that opens an address."""

    name: str = "test"
    opened: list[list[str]] = field(default_factory=list)

    def start(self, command: list[str], **streams: Any) -> None:
        assert set(streams.values()) == {subprocess.DEVNULL, True}
        self.opened.append(command)


LINKS = """See [the paper](https://example.org/paper?a=1&b=2), or (https://example.com/x_y_(z)).

Not [this](javascript:alert(1)), [that](file:///etc/passwd) or [them](https://good.org@bad.org/)."""


def place_of(app: FrozenApp, words: str) -> tuple[int, int]:
    """The position in the transcript of the second letter of `words`."""
    lines = app.chat.transcript.plain_text.split("\n")
    y = next(i for i, line in enumerate(lines) if words in line)
    return app.chat.transcript.margin + lines[y].index(words) + 1, y


async def test_links_of_an_answer_open_in_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Browser()
    monkeypatch.setattr(webbrowser, "get", lambda: browser)
    monkeypatch.setattr(subprocess, "Popen", browser.start)
    app = FrozenApp(chat_engine(Script(pieces=(LINKS,))))
    async with app.run_test(size=(120, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "links")
        for words, address in (
            ("the paper", "https://example.org/paper?a=1&b=2"),
            ("(https://example.org", "https://example.org/paper?a=1&b=2"),
            ("https://example.com/x", "https://example.com/x_y_(z)"),
        ):
            await pilot.click("#transcript", offset=place_of(app, words))
            await wait_until(pilot, lambda: bool(browser.opened))
            assert browser.opened.pop() == [sys.executable, "-m", "webbrowser", "-t", address]
            assert app._notifications and address in [*app._notifications][-1].message
            assert app.focused is app.chat.prompt
        for words in ("this", "that", "them", "(https://good.org", "See "):
            await pilot.click("#transcript", offset=place_of(app, words))
        await wait_until(pilot, lambda: all(work.group != "links" for work in app.workers))
        assert not browser.opened
        monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
        await pilot.click("#transcript", offset=place_of(app, "the paper"))
        await wait_until(pilot, lambda: app.clipboard == "https://example.org/paper?a=1&b=2")
        assert not browser.opened, "a browser for this very terminal would take it"


async def test_the_wheel_marks_requests() -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        table = app.screen.query_one("#requests", Canvas)
        await wheel(pilot, table, down=True)
        await wheel(pilot, table, down=True)
        assert "▸ chatcmpl-3f9" in table.text
        await wheel(pilot, table, down=False)
        assert "▸ chat-1" in table.text


async def test_footer_and_lists_can_be_clicked() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        for words, screen in (("Help", HelpScreen), ("Engine", DashboardScreen)):
            key = next(k for k in app.screen.query("FooterKey") if k.description == words)  # type: ignore[attr-defined]
            await pilot.click(key)
            await wait_until(pilot, lambda screen=screen: isinstance(app.screen, screen))
            if screen is HelpScreen:
                await pilot.press("escape")
                await pilot.pause()
        await pilot.press("f9")
        options = app.screen.query_one(OptionList)
        await wheel(pilot, options, down=True)
        assert isinstance(app.screen, ThemeChooser)
        await pilot.click(options, offset=(1, 1))
        await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))
        assert app.theme != "termgen-dark"
