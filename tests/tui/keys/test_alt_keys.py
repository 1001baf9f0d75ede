"""Alt keys of terminals without the kitty protocol: Textual's parser, then the app's fields."""

from __future__ import annotations

import sys
import time

import pytest
from fake_engine import Script
from textual import _ansi_sequences, _xterm_parser
from textual.constants import ESCAPE_DELAY
from textual.events import Key
from textual.widgets import Input, TextArea
from tui_harness import FrozenApp, chat_engine, ready

from termgen.tui.keys.alt_keys import let_alt_keys_through

SEQUENCES = _ansi_sequences.ANSI_SEQUENCES_KEYS


def parsed(text: str) -> Key:
    parser = _xterm_parser.XTermParser()
    events = list(parser.feed(text))
    time.sleep(2 * ESCAPE_DELAY)
    events += parser.tick()
    (event,) = events
    assert isinstance(event, Key)
    return event


@pytest.mark.parametrize(
    ("platform", "text", "key"),
    [
        ("linux", "\x1b1", "alt+1"),
        ("darwin", "\x1b1", "¡"),
        ("linux", "\x1b\r", "alt+enter"),
        ("darwin", "\x1b\r", "alt+enter"),
        ("linux", "\x1br", "alt+r"),
        ("darwin", "\x1br", "alt+r"),
        ("linux", "\x1bb", "ctrl+left"),
        ("linux", "\x1bR", "alt+shift+r"),
        ("linux", "\r", "enter"),
    ],
)
def test_escape_and_a_key(
    monkeypatch: pytest.MonkeyPatch, platform: str, text: str, key: str
) -> None:
    whole = dict(SEQUENCES) | {"\x1b1": "¡"}  # another test may have started the app
    monkeypatch.setattr(_xterm_parser, "ANSI_SEQUENCES_KEYS", whole)
    monkeypatch.setattr(sys, "platform", platform)
    let_alt_keys_through(whole)
    event = parsed(text)
    assert key in (event.key, event.character)


def test_alt_keys_in_a_row_are_each_their_own() -> None:
    let_alt_keys_through(SEQUENCES)
    parser = _xterm_parser.XTermParser()
    events = list(parser.feed("\x1br\x1bl\x1b\r\x1b[1;3Da"))
    keys = [(event.key, event.character) for event in events if isinstance(event, Key)]
    alone = [(key, None) for key in ("alt+r", "alt+l", "alt+enter", "alt+left")]
    assert keys == [*alone, ("a", "a")]


@pytest.mark.parametrize("opens", ["", "f3", "f4", "ctrl+r", "ctrl+p", "ctrl+b"])
async def test_an_alt_key_with_a_letter_types_nothing(opens: str) -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        if opens:
            await pilot.press(opens)
            await pilot.pause()
        event = parsed("\x1bQ")
        assert event.key == "alt+shift+q" and event.character == "Q", "what the parser gives"
        before = [f.value if isinstance(f, Input) else f.text for f in fields(app)]
        app.post_message(event)
        await pilot.pause()
        await pilot.pause()
        after = [f.value if isinstance(f, Input) else f.text for f in fields(app)]
        assert after == before and after


def fields(app: FrozenApp) -> list[Input | TextArea]:
    return [f for f in app.screen.query("*") if isinstance(f, Input | TextArea)]
