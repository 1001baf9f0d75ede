"""NO_COLOR and terminals of sixteen colours: different meanings have different signs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import Script, make_memory_ledger
from rich.color import ColorSystem
from tui_harness import (
    FrozenApp,
    ask,
    chat_engine,
    feed_dashboard,
    ready,
    shipped_themes,
    wait_until,
)

from termgen.config import UIConfig
from termgen.tui import app as app_module
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.dashboard.pages import graphs, kv_map, lanes, timeline
from termgen.tui.paint import palette as palette_module
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import COLOUR_GLYPHS, PLAIN_GLYPHS, Glyphs, Palette, has_few_colours
from termgen.tui.themes.colour_check import CATEGORIES
from termgen.tui.themes.theme_files import load_theme


@pytest.fixture(params=["NO_COLOR", "sixteen"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        for module in (app_module, palette_module):
            monkeypatch.setattr(module, "has_few_colours", lambda app: True)
    return str(request.param)


def sign_groups(glyphs: Glyphs) -> Iterator[tuple[str, list[str]]]:
    """Signs that appear side by side with different meanings, by page."""
    kinds = kv_map.KvCells(kinds=kv_map.np.arange(7, dtype="uint8"), blocks_per_cell=1)
    (row,) = kv_map.map_rows(kinds, 7, glyphs)
    yield "blocks", [text for text, _ in row]
    yield "batch", [glyphs.prefill, glyphs.decode, glyphs.padding, " "]
    yield "lanes", [sign for sign, _ in lanes._signs(glyphs).values() if sign != " "]
    every = range(7)
    lane = timeline._lane("", list(every), glyphs)[1:]
    yield "timeline", [text for text, _ in lane]
    yield "lengths", [*glyphs.lengths, "·"]


def test_plain_signs_are_all_different() -> None:
    for page, signs in sign_groups(PLAIN_GLYPHS):
        assert "".join(signs) and len("".join(signs)) == len(set("".join(signs))), page
    in_colour = dict(sign_groups(COLOUR_GLYPHS))
    assert len(set(in_colour["batch"])) < 4, "where there are colours, one sign has several"


def test_the_parts_of_the_memory_have_letters() -> None:
    rows = graphs.memory_panel(make_memory_ledger(), Frame(84, 14, True), PLAIN_GLYPHS)
    body = ["".join(text for text, _ in row).strip("│ ") for row in rows[1:-1]]
    signs = [line[0] for line in body[1:] if line]
    letters = [sign for sign in signs if sign != "·"]
    assert len(letters) == len(set(letters)) >= 4
    assert len(letters) - 1 <= len(set(body[0]) & set(letters)), (
        "the bar is made of the signs of the lines"
    )


async def test_every_page_says_by_signs_what_colours_say(mode: str) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)

        def text(name: str) -> str:
            return app.screen.query_one(name, Canvas).text

        assert {"◆", "■", "▣", "▫", "·"} <= set(text("#blocks"))
        assert {"█", "▒", "░", "F", "P", "N"} <= set(text("#batch"))
        assert {"●", "▶", "○"} <= set(text("#requests"))
        assert "● live" in text("#header")
        await pilot.press("down")
        assert "█" in text("#blocks") and "▸ chat-1" in text("#requests")
        await pilot.press("space")
        assert "❚❚ paused" in text("#header")
        for key, signs in (("t", "█▒La·"), ("b", "█▒░✂"), ("k", "◆▣▫·"), ("i", "▒q"), ("g", "━")):
            await pilot.press(key)
            await pilot.pause()
            assert set(signs) <= set(text("#page")), key


async def test_lengths_of_requests_differ_by_sign(mode: str) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        table = app.screen.query_one("#requests", Canvas).text
        assert "▫■▒" in table.replace("▫▫", "▫").replace("■■", "■") or "▫" in table
        assert {"▫", "■", "▒"} <= set(table)


async def test_the_chat_says_by_signs_what_colours_say(mode: str) -> None:
    app = FrozenApp(chat_engine(Script(pieces=("<think>hm", "</think>", "```py\nx\n```"))))
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        app.chat.files.attach((Attachment("notes.md", "few words"),))
        await ask(app, pilot, "why")
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: len(app.chat.conversation.turns[0].siblings) == 2)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        await pilot.press("alt+up", "ctrl+b")
        await wait_until(pilot, lambda: "why" in app.chat.panel.session_list.text)
        shown = app.chat.transcript.plain_text
        for sign in ("▎ why", "▤ notes.md", "◂ alt+e", "‹2/2›", "▸ thought for", "[1] copy"):
            assert sign in shown, sign
        assert "▸● why" in app.chat.panel.session_list.text
        app.chat.prompt.focus()
        await pilot.press("ctrl+t")
        assert "▾ thought for" in app.chat.transcript.plain_text
        await wait_until(pilot, lambda: "▸" not in app.chat.panel.session_list.text)
        assert "● why" in app.chat.panel.session_list.text


async def test_what_is_drawn_has_no_colour_or_one_of_sixteen(mode: str) -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        assert app.theme == ("termgen-16" if mode == "sixteen" else "termgen-dark")
        await pilot.press("f1")
        await pilot.pause()
        await pilot.press("escape", "f2")
        await feed_dashboard(app, pilot)
        for _ in range(2):
            strips = app.screen._compositor.render_strips()
            styles = [part.style for strip in strips for part in strip if part.text.strip()]
            colors = {c for s in styles if s is not None for c in (s.color, s.bgcolor) if c}
            assert len(colors) > 3
            for color in colors:
                if mode == "sixteen":
                    where = [
                        (p.text, p.style)
                        for s in strips
                        for p in s
                        if p.style and color in (p.style.color, p.style.bgcolor)
                    ]
                    assert color.is_system_defined or color.is_default, where[:3]
                else:
                    assert color.triplet is not None and len(set(color.triplet)) == 1, color
            await pilot.press("1")
            await wait_until(pilot, lambda: bool(app.screen.query("#transcript")))


def test_the_theme_of_sixteen_keeps_its_categories_apart() -> None:
    theme = load_theme(shipped_themes() / "termgen-16.toml")
    assert theme.ansi
    palette = Palette({**theme.to_color_system().generate(), **theme.variables})
    system = ColorSystem.STANDARD
    for category in CATEGORIES:
        seen = {palette.style(role).render("x", color_system=system) for role in category}
        assert len(seen) == len(category), category
    assert palette.style("text@select").bgcolor != palette.style("text").bgcolor
    assert palette.style("border").color != palette.style("border").bgcolor


async def test_a_person_may_choose_another_theme_on_such_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module, "has_few_colours", lambda app: True)
    app = FrozenApp(chat_engine(), ui=UIConfig(theme="termgen-light"))
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        assert app.theme == "termgen-light" and not has_few_colours(app)
