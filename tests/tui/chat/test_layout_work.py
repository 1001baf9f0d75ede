"""Long entries of the transcript: a thread lays them out, no frame waits, the result is the
same."""

from __future__ import annotations

import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
from fake_engine import make_model_info
from textual.app import App, ComposeResult
from tui_harness import tell_parses, wait_until

from termgen.tui.chat.state.conversation import AnswerState, Turn
from termgen.tui.chat.widgets import entries
from termgen.tui.chat.widgets.chat_rows import question_rows
from termgen.tui.chat.widgets.entries import AnswerEntry, QuestionEntry
from termgen.tui.chat.widgets.transcript import AT_ONCE, Transcript
from termgen.tui.paint import code_panel, markdown
from termgen.tui.paint.markdown import render
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.spans import Row, row_text

TABLE = "| name | value | note |\n|---|--:|---|\n" + "".join(
    f"| row {i} | {7 * i} | some `text` of {i}, longer than before |\n" for i in range(300)
)
PROSE = "A **word** here, then more of it that is longer than a line.\n\n- an item\n- another\n\n"
CODE = "```python\n" + "".join(f"x{i} = {i}  # of many\n" for i in range(200)) + "```\n"
LONG = PROSE * 20 + TABLE + "\nAnd an end.\n"


class Sheet(App[None]):
    CSS = "Transcript { overflow-x: hidden; overflow-y: scroll; }"

    def compose(self) -> ComposeResult:
        yield Transcript()

    def on_mount(self) -> None:
        self.sheet.set_palette(Palette({"foreground": "#e0e0e0", "background": "#101010"}))

    @property
    def sheet(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def is_done(self) -> bool:
        return not self.sheet._work.is_running


def answer(text: str, *, is_open: bool = False) -> AnswerEntry:
    turn = Turn("q", answer=text)
    turn.stats.output_tokens = 1
    entry = AnswerEntry(turn, make_model_info(), lambda action: "x")
    entry.feed(text)
    if not is_open:
        turn.end(AnswerState.DONE)
        entry.close()
    return entry


def question(text: str) -> QuestionEntry:
    return QuestionEntry(Turn(text), lambda action: "x")


@pytest.fixture
def in_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in characters of all parses in the screen's own thread."""
    lengths: list[int] = []
    screen_thread = threading.get_ident()

    def note(source: str) -> None:
        if threading.get_ident() == screen_thread:
            lengths.append(len(source))

    tell_parses(monkeypatch, note)
    return lengths


def expected(sheet: Transcript, *texts: str) -> list[str]:
    """The answers, each parsed as a whole."""
    lines: list[str] = []
    for text in texts:
        lines += (row_text(row) for row in render(text, sheet.text_width - 2) if row)
    return [line.strip() for line in lines if line.strip()]


def shown(sheet: Transcript) -> list[str]:
    """The transcript without headers and footers."""
    lines = [line.strip() for line in sheet.plain_text.split("\n")]
    around = "", "1 tok", make_model_info().model_id
    return [line for line in lines if line not in around]


async def test_a_long_chat_is_opened_and_resized_without_a_long_frame(in_frames: list[int]) -> None:
    app, texts = Sheet(), [LONG, PROSE, CODE, *[PROSE] * 30, "The last word."]
    async with app.run_test(size=(90, 24)) as pilot:
        sheet = app.sheet
        sheet.set_entries([answer(text) for text in texts])
        sheet.to_end()
        assert "The last word." in sheet.plain_text and "row 299" not in sheet.plain_text
        assert not app.is_done
        for width in (90, 60, 75):
            await pilot.resize_terminal(width, 24)
            await pilot.pause()
            assert "The last word." in sheet.plain_text
            await wait_until(pilot, lambda: app.is_done)
            await pilot.pause()
            assert max(in_frames) <= AT_ONCE
            assert shown(sheet) == expected(sheet, *texts)
            assert sheet.at_end
            in_frames.clear()


async def test_another_margin_lays_nothing_out(in_frames: list[int]) -> None:
    app = Sheet()
    async with app.run_test(size=(120, 24)) as pilot:
        app.sheet.set_entries([answer(PROSE), answer(LONG)])
        await wait_until(pilot, lambda: app.is_done)
        before = app.sheet.plain_text
        in_frames.clear()
        await pilot.resize_terminal(140, 30)
        await pilot.pause()
        assert app.sheet.plain_text == before and not in_frames
        assert app.sheet.virtual_size.width == 140 and app.is_done


async def test_closing_a_long_table_shows_it_as_it_was_until_it_is_whole(
    in_frames: list[int],
) -> None:
    wider = TABLE + "| the widest name of them all | 1 | x |\n"
    app, entry = Sheet(), answer(wider, is_open=True)
    async with app.run_test(size=(90, 24)) as pilot:
        sheet = app.sheet
        sheet.add(entry)
        sheet.update(entry)
        sheet.to_end()
        live = shown(sheet)
        in_frames.clear()
        entry.turn.end(AnswerState.DONE)
        entry.close()
        sheet.update(entry)
        assert shown(sheet) == [line.rstrip(" ▍") for line in live] and not in_frames
        assert "tok" in sheet.plain_text.split("\n")[-1], "that it is complete is told at once"
        await wait_until(pilot, lambda: app.is_done)
        assert shown(sheet) != live and "tok" in sheet.plain_text.split("\n")[-1]
        assert sheet.at_end and not in_frames
        assert shown(sheet) == expected(sheet, wider)


async def test_a_code_block_that_is_streamed_is_resized_without_a_long_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, entry, coloured = Sheet(), answer("", is_open=True), []
    screen_thread, highlight = threading.get_ident(), code_panel.highlight

    def telling(code: str, language: str) -> list[Row]:
        if threading.get_ident() == screen_thread:
            coloured.append(len(code))
        return highlight(code, language)

    monkeypatch.setattr(code_panel, "highlight", telling)
    code_panel._open_code_line.cache_clear()
    async with app.run_test(size=(90, 24)) as pilot:
        sheet = app.sheet
        sheet.add(entry)
        for at in range(0, len(CODE) - 4, 100):
            entry.feed(CODE[at : min(at + 100, len(CODE) - 4)])
            sheet.update(entry)
        coloured.clear()
        await pilot.resize_terminal(60, 24)
        await pilot.pause()
        await wait_until(pilot, lambda: app.is_done)
        assert sum(coloured) <= AT_ONCE and shown(sheet) == expected(sheet, CODE[:-4])
        coloured.clear()
        entry.feed("```\nThat is all of it.")
        sheet.update(entry)
        await wait_until(pilot, lambda: app.is_done)
        assert not coloured
        assert shown(sheet)[:-1] == expected(sheet, CODE + "That is all of it.")[:-1]


async def test_an_answer_that_is_streamed_is_resized_without_a_long_frame(
    in_frames: list[int],
) -> None:
    app, entry = Sheet(), answer("", is_open=True)
    async with app.run_test(size=(90, 24)) as pilot:
        sheet, text = app.sheet, PROSE * 40 + TABLE
        sheet.add(entry)
        for at in range(0, len(text), 500):
            entry.feed(text[at : at + 500])
            sheet.update(entry)
        for width, more in ((60, "| the widest | 1 | x |\n"), (75, "\nIt goes on.\n")):
            in_frames.clear()
            await pilot.resize_terminal(width, 24)
            await pilot.pause()
            entry.feed(more)
            text += more
            sheet.update(entry)
            last = sheet.plain_text[-400:]
            assert ("widest" in last or "It goes on." in last) and sheet.at_end
            await wait_until(pilot, lambda: app.is_done)
            assert max(in_frames) <= AT_ONCE
        assert shown(sheet)[:-1] == expected(sheet, text)[:-1] and "It goes on." in shown(sheet)[-1]
        entry.turn.end(AnswerState.DONE)
        entry.close()
        sheet.update(entry)
        assert shown(sheet) == expected(sheet, text) and app.is_done and sheet.at_end


async def test_a_reference_at_the_end_makes_no_long_frame(in_frames: list[int]) -> None:
    app, entry = Sheet(), answer("[it] is late.\n\n", is_open=True)
    async with app.run_test(size=(90, 24)) as pilot:
        sheet, text = app.sheet, "[it] is late.\n\n" + PROSE * 60 + "[it]: http://x.y\n"
        sheet.add(entry)
        for _ in range(60):
            entry.feed(PROSE)
            sheet.update(entry)
        entry.feed("[it]: http://x.y\n")
        in_frames.clear()
        entry.turn.end(AnswerState.DONE)
        entry.close()
        sheet.update(entry)
        assert "[it] is late." in sheet.plain_text and not app.is_done
        await wait_until(pilot, lambda: app.is_done)
        assert not in_frames and shown(sheet) == expected(sheet, text)
        assert "it (http://x.y) is late." in sheet.plain_text


async def test_unfolded_thoughts_make_no_long_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    app, entry, lengths = Sheet(), answer(PROSE), []
    screen_thread, wrapped = threading.get_ident(), entries._wrapped

    def telling(lines: str, width: int) -> list[Row]:
        if threading.get_ident() == screen_thread:
            lengths.append(len(lines))
        return wrapped(lines, width)

    monkeypatch.setattr(entries, "_wrapped", telling)
    lines = [f"thought {i} of a model that has many" for i in range(1000)]
    entry.turn.thought.text, entry.turn.thought.is_over = "\n".join(lines), True
    async with app.run_test(size=(90, 24)) as pilot:
        app.sheet.add(entry)
        assert entry.num_chars_to_do(80) == entry.num_chars_to_do(70), "folded, they cost nothing"
        entry.fold()
        app.sheet.update(entry)
        assert "thought 999" in app.sheet.plain_text and "thought 0 " not in app.sheet.plain_text
        for width in (90, 60):
            await pilot.resize_terminal(width, 24)
            await pilot.pause()
            await wait_until(pilot, lambda: app.is_done)
            told = [line[2:] for line in shown(app.sheet) if line.startswith("│ ")]
            assert told == lines and sum(lengths) <= 2 * AT_ONCE
            lengths.clear()


def test_a_question_that_is_marked_is_not_laid_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_laid_out = 0

    def counting(*args: Any) -> list[Row]:
        nonlocal num_laid_out
        num_laid_out += 1
        return question_rows(*args)

    monkeypatch.setattr(entries, "question_rows", counting)
    entry = question("word " * 1000)
    plain = entry(60)
    entry.is_marked = True
    marked = entry(60)
    assert marked[1:] == plain[1:] and "◂" in row_text(marked[0]) and num_laid_out == 1
    assert "◂" not in row_text(plain[0]) and entry(50) != marked and num_laid_out == 2


async def test_what_is_in_view_stays_while_more_comes_above_it() -> None:
    app = Sheet()
    async with app.run_test(size=(90, 24)) as pilot:
        sheet = app.sheet
        sheet.set_entries([answer(LONG), question("Where am I?"), answer(PROSE * 12)])
        sheet.scroll_to(y=sheet._starts[1], animate=False, immediate=True)
        assert not sheet.at_end and not app.is_done

        def top() -> list[str]:
            rows = sheet._rows[sheet.scroll_offset.y :][:20]
            return [row_text(row) for row in rows]

        before = top()
        assert "Where am I?" in "".join(before)
        await wait_until(pilot, lambda: app.is_done)
        await pilot.pause()
        assert top() == before and len(sheet._rows) > 300


async def test_a_question_that_was_marked_meanwhile_is_marked() -> None:
    app, entry = Sheet(), question("word " * 2 * AT_ONCE)
    async with app.run_test(size=(90, 24)) as pilot:
        app.sheet.set_entries([entry])
        assert not app.is_done
        entry.is_marked = True
        await wait_until(pilot, lambda: app.is_done)
        assert "◂" in app.sheet.plain_text and app.sheet.plain_text.count("word") == 2 * AT_ONCE


def test_no_two_threads_make_the_rules_of_a_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one of them would find no rules, and search for the end of a block for ever."""
    spec = spec_from_file_location("another_markdown", markdown.__file__)
    assert spec is not None and spec.loader is not None
    fresh = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, fresh)
    spec.loader.exec_module(fresh)
    rulers = [part.ruler for p in (fresh.parser, fresh._blocks) for part in (p.core, p.block)]
    rulers += [fresh.parser.inline.ruler, fresh.parser.inline.ruler2]
    assert all(ruler.__cache__ is not None for ruler in rulers)
