"""Escape and a digit mean alt and the digit, except on a Mac."""

from __future__ import annotations

import sys
import time

import pytest
from textual import _ansi_sequences, _xterm_parser
from textual.constants import ESCAPE_DELAY
from textual.events import Key

from termgen.tui.app import let_alt_digits_through


@pytest.mark.parametrize(("platform", "key"), [("linux", "alt+1"), ("darwin", "¡")])
def test_escape_and_digit(monkeypatch: pytest.MonkeyPatch, platform: str, key: str) -> None:
    whole = dict(_ansi_sequences.ANSI_SEQUENCES_KEYS)
    whole["\x1b1"] = "¡"  # another test may have started the app
    monkeypatch.setattr(_xterm_parser, "ANSI_SEQUENCES_KEYS", whole)
    monkeypatch.setattr(sys, "platform", platform)
    let_alt_digits_through(whole)
    parser = _xterm_parser.XTermParser()
    events = list(parser.feed("\x1b1"))
    time.sleep(2 * ESCAPE_DELAY)
    events += parser.tick()
    (event,) = events
    assert isinstance(event, Key) and key in (event.key, event.character)
