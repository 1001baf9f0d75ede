"""Viewing the transcript: scrolling, resizing, selecting, copying."""

from __future__ import annotations

from typing import Any

import pytest
from chat_harness import SIZE, shown
from fake_engine import Script
from tui_harness import (
    ANSWER,
    FrozenApp,
    ask,
    chat_engine,
    pieces,
    ready,
    wait_until,
)

from termgen.tui.paint.markdown import render
from termgen.tui.paint.spans import row_text


async def test_control_bytes_of_the_model_never_reach_the_screen() -> None:
    evil = ("a\x1b]52;c;eA==\x07", "b\x9b2J", "\r", "\nc \u202eabc")
    app = FrozenApp(chat_engine(Script(pieces=evil)))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        lines = [
            strip.text for strip in app.chat.transcript.render_lines(app.chat.transcript.region)
        ]
        drawn = "".join(lines)
        assert not [c for c in drawn if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e"]
        assert "a␛]52;c;eA==␇b" in drawn and "⇄abc" in drawn
        assert app.chat.conversation.turns[0].answer == "".join(evil)


async def test_copy_the_last_answer() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("**bold**",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        app.chat.begin_browsing()
        await pilot.press("y")
        assert app.clipboard == "**bold**"
        await pilot.press("i")
        assert app.focused is app.chat.prompt
        await ask(app, pilot, "/copy")
        assert app.clipboard == "**bold**"


async def test_it_follows_the_tail_until_the_user_scrolls_up() -> None:
    text = "\n\n".join(f"line {i}" for i in range(60))
    engine = chat_engine(Script(pieces=pieces(text, 8), hold_after=40))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why", wait=False)
        transcript = app.chat.transcript
        await wait_until(pilot, lambda: transcript.max_scroll_y > 10)
        assert transcript.at_end
        await pilot.press("ctrl+up")
        await pilot.pause()
        top = transcript.scroll_offset.y
        assert not transcript.at_end
        await wait_until(pilot, lambda: "↓ more below" in app.chat.status.text)
        engine.release.set()
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert transcript.scroll_offset.y == top
        await pilot.press("ctrl+down", "ctrl+down", "ctrl+down", "ctrl+down", "ctrl+down")
        await pilot.pause()
        assert transcript.at_end


async def test_text_can_be_selected_with_the_mouse() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("alpha beta gamma",))))
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        transcript = app.chat.transcript
        y = transcript.plain_text.split("\n").index("  alpha beta gamma")
        left = transcript.margin + 2
        await pilot.mouse_down(transcript, offset=(left, y))
        await pilot.hover(transcript, offset=(left + 10, y))
        await pilot.mouse_up(transcript, offset=(left + 10, y))
        await pilot.pause()
        assert (app.screen.get_selected_text() or "").strip().startswith("alpha bet")


async def test_resizing_wraps_everything_anew() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        for size in ((60, 20), (140, 40), (30, 8), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            width = app.chat.transcript.text_width - 2
            expected = [row_text(row).rstrip() for row in render(ANSWER, width)]
            assert "\n".join(f"  {line}".rstrip() for line in expected) in shown(app)


async def test_resizing_keeps_the_tail_or_the_place_in_view() -> None:
    text = "\n\n".join(f"line {i}" for i in range(60))
    app = FrozenApp(chat_engine(Script(pieces=pieces(text, 8))))
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        transcript = app.chat.transcript
        for size in ((50, 12), (20, 6), (80, 24), (140, 40), (140, 20)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert transcript.at_end, size
        await pilot.press("ctrl+up", "ctrl+up")
        await pilot.pause()
        top = transcript.scroll_offset.y
        await pilot.resize_terminal(140, 16)
        await pilot.pause()
        assert transcript.scroll_offset.y == top and not transcript.at_end


async def test_drawing_is_coalesced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = chat_engine(Script(pieces=tuple("word " for _ in range(400))))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        drawn: list[Any] = []
        update = app.chat.transcript.update
        monkeypatch.setattr(
            app.chat.transcript, "update", lambda entry: (drawn.append(entry), update(entry))
        )
        await ask(app, pilot, "why")
        assert app.chat.conversation.turns[0].stats.output_tokens == 400
        assert len(drawn) < 100
