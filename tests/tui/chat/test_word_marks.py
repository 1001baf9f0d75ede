"""Words of a search, marked in the chat that it opens, until the next key."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script
from test_tui_sessions import app_with
from textual.pilot import Pilot
from tui_harness import FrozenApp, ask, chat_engine, pieces, ready, wait_until

from termgen.tui.chat import chat_screen as chat_module
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.lists.find_panel import FindPanel
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.chat.widgets.word_marks import MARK, WordMarks
from termgen.tui.paint.spans import Row, row_text

SIZE = (100, 24)
ANSWER = (
    """The first paragraph says nothing of it.

- **Ti**gers are [striped cats](https://tiger.example/x), a `tiger` is one.

"""
    + "Another line.\n\n" * 30
)
QUESTION = "What is a tiger?"


@pytest.fixture(autouse=True)
def _esc_browses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "STOP_GRACE_S", -1.0)


def tiger_engine() -> Any:
    return chat_engine(Script(pieces=pieces(ANSWER)))


def marked(row: Row) -> list[str]:
    return [text for text, role in row if role.startswith(MARK)]


def marked_words(app: FrozenApp) -> list[str]:
    """What the screen shows reversed, in order."""
    transcript = app.chat.transcript
    strips = [transcript.render_line(y) for y in range(transcript.size.height)]
    return [
        segment.text
        for strip in strips
        for segment in strip
        if segment.style is not None and segment.style.reverse and segment.text.strip()
    ]


def test_words_are_marked_across_styles_and_links_stay() -> None:
    row: Row = (("a ", "text"), ("Ti", "text/b"), ("ger is", "link/u https://x.example"))
    on = WordMarks(["IS", "tiger"], ()).on(row)
    assert row_text(on) == row_text(row)
    assert on == (
        ("a ", "text"),
        ("Ti", MARK),
        ("ger", f"{MARK} https://x.example"),
        (" ", "link/u https://x.example"),
        ("is", f"{MARK} https://x.example"),
    )
    assert WordMarks(["zebra"], ()).on(row) is row
    fold: Row = (("▸ thought for 1.8 s", "muted@background"),)
    assert WordMarks(["thought"], ()).on(fold) is fold
    assert marked(WordMarks(["a", "ab"], ()).on((("xabx", "text"),))) == ["ab"], "the longer one"


def test_any_row_keeps_its_text() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        row = tuple(
            ("".join(rng.choices("ab .*", k=rng.randrange(1, 6))), rng.choice(["text", "b x y"]))
            for _ in range(rng.randrange(1, 6))
        )
        words = ["".join(rng.choices("ab.*", k=rng.randrange(1, 3))) for _ in range(2)]
        on = WordMarks(words, ()).on(row)
        assert row_text(on) == row_text(row) and all(text for text, _ in on)
        assert bool(marked(on)) == any(word in row_text(row) for word in words)


async def test_a_hit_of_the_search_in_all_chats_opens_with_its_words_marked(
    tmp_path: Path,
) -> None:
    app = app_with(tmp_path / "chats.sqlite3", tiger_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, QUESTION)
        await pilot.press("ctrl+n")
        await pilot.press("ctrl+b", *"tiger")
        await wait_until(pilot, lambda: "tiger" in app.chat.panel.session_list.text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: bool(marked_words(app)))
        assert marked_words(app) == ["tiger", "Ti", "ger", "tiger", "tiger"]
        await pilot.press("escape")
        assert marked_words(app) == [] and not app.chat.is_browsing, "the marks go, no more"
        await pilot.press("escape")
        assert app.chat.is_browsing


async def find_tigers(app: FrozenApp, pilot: Pilot[Any], words: str) -> None:
    await ask(app, pilot, f"/find {words}", wait=False)
    await wait_until(pilot, lambda: isinstance(app.screen, FindPanel))
    await pilot.press("enter")
    await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
    await pilot.pause()


async def test_the_next_key_takes_the_marks_and_is_typed() -> None:
    app = FrozenApp(tiger_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, QUESTION)
        await ask(app, pilot, "And more?")
        await find_tigers(app, pilot, "striped")
        await wait_until(pilot, lambda: marked_words(app) == ["striped"])
        await pilot.resize_terminal(80, 30)
        await pilot.pause()
        assert marked_words(app) == ["striped"], "at another width, too"
        await pilot.press("x")
        assert marked_words(app) == [] and app.chat.prompt.text == "x"


async def test_words_far_below_are_brought_into_view() -> None:
    text = "Nothing here.\n\n" * 400 + "The needle.\n\n" + "Nothing there.\n\n" * 400
    app = FrozenApp(chat_engine(Script(pieces=(text,))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "Where?")
        await pilot.resize_terminal(90, 24)  # it is laid out anew, from its end
        await find_tigers(app, pilot, "needle")
        await wait_until(pilot, lambda: marked_words(app) == ["needle"])


async def test_headers_and_figures_are_no_text() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("you made tok/s of smollm2",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "So?")
        await find_tigers(app, pilot, "you tok smollm2")
        await wait_until(pilot, lambda: bool(marked_words(app)))
        assert marked_words(app) == ["you", "tok", "smollm2"]


async def test_a_stream_without_marks_looks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object) -> Row:
        raise AssertionError("nothing is marked")

    monkeypatch.setattr(Transcript, "_marked", never)
    app = FrozenApp(tiger_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, QUESTION)
        assert "striped" in app.chat.transcript.plain_text and marked_words(app) == []
