"""A stream of markdown: it ends like a full parse, and no frame of it costs much."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_engine import make_model_info
from textual.app import App, ComposeResult
from textual.strip import Strip
from tui_harness import in_pieces, tell_parses

from termgen.tui.chat.state.conversation import Turn
from termgen.tui.chat.widgets.entries import AnswerEntry
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.paint import code_panel, markdown, markdown_stream, open_blocks
from termgen.tui.paint.markdown import render
from termgen.tui.paint.markdown_stream import LONG_BLOCK, StreamingMarkdown
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.spans import Row, row_text
from termgen.tui.themes.theme_files import DEFAULT_THEME, load_theme, shipped_folder

WIDTH = 60
TABLE = "| name | value | note |\n|---|--:|---|\n" + "".join(
    f"| row {i} | {7 * i} | some `text` of {i} |\n" for i in range(1000, 1300)
)
PARAGRAPH = " ".join(f"word{i} **bold{i}** `code`" for i in range(500))
SECTION = (
    "## A heading\n\nSome prose with **words** in it, and `code` too, that is longer than a line "
    "and goes on.\n\n- an item\n- another\n\n```python\nreturn 1\n```\n\n"
    "| a | b |\n|---|---|\n| c | d |\n\n"
)


PARTS = (
    *SECTION.splitlines(keepends=True),
    TABLE[:300],
    PARAGRAPH[:200],
    "[x]: u\n",
    "\n",
    "[x]",
)


def make_everything_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (open_blocks, markdown_stream):
        monkeypatch.setattr(module, "LONG_BLOCK", 40)
        monkeypatch.setattr(module, "PART_CHARS", 60)
    monkeypatch.setattr(open_blocks, "KEPT_OPEN", 12)
    monkeypatch.setattr(open_blocks, "LONG_TABLE", 100)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in characters of all parses."""
    lengths: list[int] = []

    tell_parses(monkeypatch, lambda source: lengths.append(len(source)))
    return lengths


def text_of(rows: list[Row]) -> list[str]:
    return [row_text(row).rstrip() for row in rows]


@pytest.mark.parametrize(
    "source",
    [TABLE, PARAGRAPH, "Before.\n\n" + TABLE, "- a\n\n" + PARAGRAPH],
    ids=["table", "paragraph", "a table later", "a paragraph later"],
)
def test_a_long_block_costs_its_end_in_each_frame(source: str, parsed: list[int]) -> None:
    stream = StreamingMarkdown()
    for at in range(0, len(source), 200):
        stream.append(source[at : at + 200])
        rows = stream.rows(WIDTH)
    assert max(parsed) <= LONG_BLOCK + 200
    assert text_of(rows) == text_of(render(source, WIDTH))
    stream.finish()
    assert stream.rows(WIDTH) == render(source, WIDTH)


def test_a_reference_that_is_defined_twice_is_the_first() -> None:
    stream = StreamingMarkdown()
    for line in ("[x]: one\n\n", "[x]: two\n\n", "see [x]\n\n", "more\n\n", "end"):
        stream.append(line)
        stream.rows(WIDTH)
    stream.finish()
    assert text_of(stream.rows(WIDTH)) == ["see x (one)", "", "more", "", "end"]


def test_a_paragraph_is_wrapped_on_over_what_is_set_aside() -> None:
    source = " ".join(f"plain{i}" for i in range(700))
    stream = StreamingMarkdown()
    for at in range(0, len(source), 333):
        stream.append(source[at : at + 333])
        assert stream.rows(WIDTH) == render(stream.source, WIDTH)


def test_a_table_that_ends_with_its_widest_line_has_its_columns() -> None:
    stream = StreamingMarkdown()
    for piece in ("| a | b |\n|---|---|\n| long", "er than before | x |\n```\ncode\n"):
        stream.append(piece)
        assert stream.rows(WIDTH) == render(stream.source, WIDTH)


def test_a_table_keeps_the_columns_it_began_with_until_it_is_complete() -> None:
    stream = StreamingMarkdown()
    stream.append(TABLE)
    before = stream.rows(WIDTH)
    stream.append(f"| x | {'1' * 30} | y |\n")
    rows = stream.rows(WIDTH)
    assert rows[: len(before)] == before
    assert "".join("".join(text_of(rows[len(before) :])).split()).count("1") == 30
    stream.append("\nafter\n")
    assert stream.rows(WIDTH) == render(stream.source, WIDTH)
    assert stream.num_frozen_rows > 300


@pytest.mark.parametrize(
    "after", ["\n# Head\n", "\n***\n", "\n> quote\n", "\n===\n", "\n\n- item\n- b\n"]
)
def test_what_ends_a_long_block_is_seen(after: str) -> None:
    stream = StreamingMarkdown()
    stream.append(PARAGRAPH)
    stream.rows(WIDTH)
    for char in after:
        stream.append(char)
        shown = "".join(text_of(stream.rows(WIDTH)))
        assert "word499" in shown and "word250" in shown
    assert text_of(stream.rows(WIDTH)) == text_of(render(stream.source, WIDTH))


def test_the_end_equals_a_full_parse_wherever_blocks_are_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_everything_long(monkeypatch)
    seed, num_long = random.randrange(2**32), 0
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(60):
        source = "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 12)))
        stream = StreamingMarkdown()
        for piece in in_pieces(source, rng, longest=20):
            stream.append(piece)
            stream.rows(WIDTH)
            num_long += stream._open is not None
        stream.finish()
        assert stream.rows(WIDTH) == render(source, WIDTH), source
    assert num_long > 100


def test_the_end_equals_a_full_parse_however_often_and_late_it_is_laid_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Widths change during the stream, and a thread may finish rows for a former width."""
    make_everything_long(monkeypatch)
    seed, num_late = random.randrange(2**32), 0
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(300):
        if number >= 60 and num_late > 50:  # the number of times is random
            break
        source = "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 12)))
        stream, puts, width = StreamingMarkdown(), [], WIDTH
        for piece in in_pieces(source, rng, longest=20):
            stream.append(piece)
            if rng.random() < 0.1:
                width = rng.choice((9, 20, WIDTH))
            stream.rows(width, at_once=rng.choice((0, 50, 200)))
            job = stream.job(width)
            if job is not None:
                puts.append(job())
            if puts and rng.random() < 0.3:
                num_late += 1
                puts.pop(0)()
        stream.finish()
        while (job := stream.job(width)) is not None:
            job()()
        for put in puts:
            put()
        assert stream.rows(width) == render(source, width), source
    assert num_late > 50


def test_a_line_of_a_table_is_laid_out_once(
    parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out: list[str] = []
    table_line = markdown._table_line

    def telling(cells: markdown.Cells, *args: Any) -> list[Row]:
        laid_out.append(cells[0][0][0])
        return table_line(cells, *args)

    monkeypatch.setattr(markdown, "_table_line", telling)
    stream, work = StreamingMarkdown(), []
    lines = TABLE.splitlines(keepends=True)
    for line in lines[:250]:
        for piece in (line[:9], line[9:]):
            stream.append(piece)
            stream.rows(WIDTH)
        work.append((sum(parsed), len(laid_out)))
        laid_out.clear()
        parsed.clear()
    assert max(work[100:]) <= (500, 2)
    before = stream.rows(WIDTH)
    stream.append("".join(lines[250:]) + "\nIt has ended.\n")
    rows = stream.rows(WIDTH, at_once=0)
    assert max(parsed) < 3 * len("".join(lines[250:])) and len(laid_out) < 60
    assert all(a is b for a, b in zip(before, rows[: len(before)], strict=True))
    assert rows == render(stream.source, WIDTH) and stream.num_chars_to_do(WIDTH) == 0


def test_what_is_laid_out_for_another_width_comes_from_its_end(parsed: list[int]) -> None:
    stream = StreamingMarkdown()
    for number in range(40):
        stream.append(f"## Number {number}\n\n" + SECTION)
        stream.rows(WIDTH)
    wide = text_of(stream.rows(WIDTH))
    narrow = text_of(render(stream.source, 30))
    parsed.clear()
    rows = text_of(stream.rows(30, at_once=2048))
    assert sum(parsed) < 2 * 2048 and rows[-60:] == narrow[-60:] and rows[:100] == wide[:100]
    while (job := stream.job(30)) is not None:
        stream.append("More. ")
        job()()
        parsed.clear()
        stream.rows(30, at_once=0)
        assert sum(parsed) < 100
    assert text_of(stream.rows(30)) == text_of(render(stream.source, 30))


def test_a_reference_has_what_is_closed_laid_out_again_but_not_at_once(parsed: list[int]) -> None:
    stream = StreamingMarkdown()
    stream.append("See [it] there.\n\n")
    for _ in range(40):
        stream.append(SECTION)
        stream.rows(WIDTH)
    stream.append("[it]: http://x.y\n")
    before = stream.rows(WIDTH)
    parsed.clear()
    stream.finish()
    assert stream.rows(WIDTH, at_once=2048) == before and not parsed
    job = stream.job(WIDTH)
    assert job is not None
    job()()
    assert stream.rows(WIDTH, at_once=0) == render(stream.source, WIDTH) != before


def test_the_end_of_a_long_answer_costs_its_last_block(parsed: list[int]) -> None:
    stream = StreamingMarkdown()
    for _ in range(100):
        stream.append(SECTION)
        stream.rows(WIDTH)
    parsed.clear()
    stream.finish()
    rows = stream.rows(WIDTH)
    assert max(parsed) <= len(SECTION)
    assert rows == render(stream.source, WIDTH)


def test_a_long_code_block_is_not_coloured_again_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coloured: list[int] = []
    highlight = code_panel.highlight

    def counting(code: str, language: str) -> list[Row]:
        coloured.append(len(code))
        return highlight(code, language)

    monkeypatch.setattr(code_panel, "highlight", counting)
    code_panel._open_code_line.cache_clear()
    stream = StreamingMarkdown()
    stream.append("```python\n")
    for number in range(900):
        stream.append(f"x{number} = f({number})  # {number}\n")
        stream.rows(WIDTH)
    stream.append("```\n\nafter\n")
    stream.rows(WIDTH)
    stream.finish()
    rows = stream.rows(WIDTH)
    assert max(coloured) < 40 and len(coloured) <= 903
    assert rows == render(stream.source, WIDTH)
    assert any(role.startswith("syn-number") for _, role in rows[-5])


def test_an_open_code_block_costs_what_has_come(parsed: list[int]) -> None:
    stream = StreamingMarkdown()
    stream.append("Look:\n\n  ```python\n")
    work = []
    for number in range(300):
        stream.append(f"  x{number % 10} = 1\n")
        stream.rows(WIDTH)
        work.append(sum(parsed))
        parsed.clear()
    assert len(set(work[2:])) == 1
    assert text_of(stream.rows(WIDTH)) == text_of(render(stream.source, WIDTH))
    parsed.clear()
    stream.append('  """\n  ```\n')
    rows = stream.rows(WIDTH, at_once=2048)
    assert sum(parsed) < 200 and text_of(rows) == text_of(render(stream.source, WIDTH))
    stream.append("Fine.\n")
    job = stream.job(WIDTH)
    assert job is not None
    job()()
    assert stream.rows(WIDTH, at_once=0) == render(stream.source, WIDTH)


@pytest.mark.parametrize(
    "end", ["```\n", "````  \n", "  ```\n", "    ```\n", "~~~\n", "``` x\n", "```"]
)
def test_what_ends_a_code_block_is_seen(end: str) -> None:
    for source in ("```py\na = 1\n", "```\n", "~~~~\n\n\n", "````\n  x\n"):
        stream = StreamingMarkdown()
        stream.append(source)
        stream.rows(WIDTH)
        for char in end + "more\n\n- **text**\n":
            stream.append(char)
            assert text_of(stream.rows(WIDTH)) == text_of(render(stream.source, WIDTH))


class Sheet(App[None]):
    """A transcript alone, and the number of its rows drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.num_drawn = 0

    def compose(self) -> ComposeResult:
        yield Transcript()

    def on_mount(self) -> None:
        app = self

        class Counting(Palette):
            def strip(self, row: Row, width: int, *, background: str = "background") -> Strip:
                app.num_drawn += 1
                return super().strip(row, width, background=background)

        theme = load_theme(shipped_folder() / f"{DEFAULT_THEME}.toml")
        variables = {**theme.to_color_system().generate(), **theme.variables}
        self.query_one(Transcript).set_palette(Counting(variables))


async def test_a_frame_at_the_end_of_a_long_answer_costs_what_it_did_at_the_start(
    parsed: list[int],
) -> None:
    app, turn = Sheet(), Turn("q")
    turn.stats.output_tokens = 1
    entry = AnswerEntry(turn, make_model_info(), lambda action: "x")
    async with app.run_test(size=(80, 24)) as pilot:
        sheet = app.query_one(Transcript)
        sheet.add(entry)
        work: list[tuple[int, int]] = []
        for _ in range(40):
            parsed.clear()
            app.num_drawn = 0
            for at in range(0, len(SECTION), 40):
                entry.feed(SECTION[at : at + 40])
                sheet.update(entry)
                await pilot.pause()
            work.append((sum(parsed), app.num_drawn))
    assert len(sheet._rows) > 500
    assert {chars for chars, _ in work[5:]} == {work[5][0]}
    assert max(drawn for _, drawn in work[-5:]) <= 1.1 * max(drawn for _, drawn in work[5:10])
