"""Guessed text, tinted in an answer: what is tinted, what stays as it is, and what it costs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import Script, make_memory_ledger
from textual.pilot import Pilot
from tui_harness import FrozenApp, ask, chat_engine, ready, wait_until

from termgen.client import TokenDelta
from termgen.tui.chat.answer_tools import GUESSES_NOTHING, SERVER_DOES_NOT_SAY
from termgen.tui.chat.widgets.draft_tint import DraftTint, drafted_in, tinted_role
from termgen.tui.chat.widgets.entries import AnswerEntry
from termgen.tui.paint.markdown import render
from termgen.tui.paint.markdown_stream import StreamingMarkdown
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.spans import Row, row_text

SOURCE = """# A **fox**

The quick *brown* fox [jumps](https://example.org/fox) over `the lazy` dog; the dog sleeps.

- one fox
- two foxes, and **three of them** that are rather long so that this item wraps to a row of its own

| name | legs |
|------|------|
| fox  | four |

```python
def fox() -> str:
    return "fox"
```

> The fox said: fox.
"""


def guessed(*words: str, source: str = SOURCE) -> DraftTint:
    """A tint of the last place of each of these texts."""
    tint = DraftTint()
    places = sorted((source.rindex(word), source.rindex(word) + len(word)) for word in words)
    tint.add(0, places)
    return tint


def tinted(rows: list[Row]) -> list[str]:
    return [text for row in rows for text, role in row if "@drafted" in role]


def without_tint(rows: list[Row]) -> list[str]:
    return [row_text(row) for row in rows]


@pytest.mark.parametrize("width", [24, 60, 120])
@pytest.mark.parametrize(
    "words", ["brown", "lazy", "sleeps", "foxes", "three of them", "four", "def", "return", "said:"]
)
def test_what_was_guessed_is_tinted_and_nothing_else(words: str, width: int) -> None:
    rows = render(SOURCE, width)
    found = guessed(words).on(rows, SOURCE)
    assert without_tint(found) == without_tint(rows)
    assert "".join("".join(tinted(found)).split()) == "".join(words.split())


def test_all_of_it_and_none_of_it() -> None:
    rows = render(SOURCE, 60)
    assert DraftTint().on(rows, SOURCE) == rows
    tint = DraftTint()
    tint.add(0, [(0, len(SOURCE))])
    found = tint.on(rows, SOURCE)
    assert without_tint(found) == without_tint(rows)
    rest = {
        word
        for row in found
        for text, role in row
        for word in text.split()
        if "@drafted" not in role
    }
    rules = {word for word in rest if set(word) <= set("─┼")}
    assert rest - rules <= {"•", "│", "▎", "python", "[1]", "copy"}


def test_part_of_a_word_and_the_blank_before_it() -> None:
    source = "The quick brown fox"
    tint = DraftTint()
    tint.add(0, [(3, 12)])
    assert tinted(tint.on(render(source, 60), source)) == [" quick br"]


def test_ranges_side_by_side_are_one() -> None:
    tint = DraftTint()
    tint.add(10, [(0, 4)])
    tint.add(14, [(0, 2), (3, 5)])
    assert tint.ranges == [(10, 16), (17, 19)]


def test_a_growing_answer_is_tinted_as_a_whole_one() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    stream, tint, at = StreamingMarkdown(), DraftTint(), 0
    while at < len(SOURCE):
        size = rng.randint(1, 12)
        if rng.random() < 0.5:
            tint.add(at, [(0, len(SOURCE[at : at + size]))])
        stream.append(SOURCE[at : at + size])
        at += size
        rows = stream.rows(60)
        assert without_tint(tint.on(rows, stream.source)) == without_tint(rows)
    stream.finish()
    whole = DraftTint()
    whole.ranges = list(tint.ranges)
    rows = stream.rows(60)
    assert tint.on(rows, SOURCE) == whole.on(rows, SOURCE)


def test_rows_that_stay_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, tint = StreamingMarkdown(), DraftTint()
    rows_made: list[Row] = []
    made = DraftTint._row

    def noted(self: DraftTint, row: Row, *rest: Any) -> Any:
        rows_made.append(row)
        return made(self, row, *rest)

    monkeypatch.setattr(DraftTint, "_row", noted)
    for number in range(200):
        text = f"Paragraph {number} of the answer, which is a line.\n\n"
        tint.add(len(stream.source), [(0, 9)])
        stream.append(text)
        tint.on(stream.rows(60), stream.source)
    assert len(rows_made) < 5 * 200


def test_pieces_of_a_delta() -> None:
    def delta(text: str, *drafted: tuple[int, int]) -> TokenDelta:
        return TokenDelta("r", 0, text, (1,), None, None, None, 1, 0, 1, drafted=drafted)

    assert drafted_in("ab", delta("ab")) == ()
    assert drafted_in("abc", delta("abc", (1, 3))) == [(1, 3)]
    assert drafted_in("x y", delta("so</think>x y", (1, 11))) == [(0, 1)]
    assert drafted_in("held back", delta("more", (0, 4))) == ()
    assert drafted_in("", delta("more", (0, 4))) == ()


def test_roles_keep_what_they_say() -> None:
    assert tinted_role("text") == "text@drafted"
    assert tinted_role("syn-string@code/b") == "syn-string@drafted/b"
    assert tinted_role("link/u http://a/b@c") == "link@drafted/u http://a/b@c"


def test_it_shows_without_colours() -> None:
    variables = {"background": "#000000", "foreground": "#ffffff", "secondary": "#8080ff"}
    colours = Palette(variables).style("text@drafted")
    assert colours.bgcolor != Palette(variables).style("text").bgcolor and not colours.underline
    for plain in (Palette(variables, mono=True), Palette(variables, few_colours=True)):
        assert plain.style("text@drafted/b").underline
        assert plain.style("text@drafted").bgcolor == plain.style("text").bgcolor


ANSWER = "A *quick* answer that repeats the question."
WORDS = "quick* answer that"


def script() -> Script:
    first = ANSWER.index(WORDS)
    texts = (ANSWER[:first], WORDS, ANSWER[first + len(WORDS) :])
    return Script(pieces=texts)


async def ready_app(pilot: Pilot[Any], app: FrozenApp) -> None:
    await ready(app, pilot)
    generate = app.engine.generate

    async def with_drafts(*args: Any, **options: Any) -> Any:
        async for delta in generate(*args, **options):
            is_guess = delta.text == WORDS
            yield replace(delta, drafted=((0, len(WORDS)),) if is_guess else ())

    app.engine.generate = with_drafts  # type: ignore[method-assign]


def rows_of(app: FrozenApp) -> list[Row]:
    return [row for row in app.chat.transcript._rows if row]


async def command(app: FrozenApp, pilot: Pilot[Any], text: str) -> None:
    app.chat.prompt.set_text(text)
    await pilot.press("enter")
    await pilot.pause()


async def test_in_a_chat() -> None:
    engine = chat_engine(script(), num_drafts=4, memory=make_memory_ledger())
    app = FrozenApp(engine)
    async with app.run_test(size=(100, 30)) as pilot:
        await ready_app(pilot, app)
        await ask(app, pilot, "Why?")
        plain = app.chat.transcript.plain_text
        assert "A quick answer that repeats" in plain and not tinted(rows_of(app))
        await command(app, pilot, "/guessed on")
        assert tinted(rows_of(app)) == ["quick", " answer that"]
        assert app.chat.transcript.plain_text == plain
        await command(app, pilot, "/guessed on")
        assert tinted(rows_of(app)), "on is on"
        await pilot.press("alt+h")
        await pilot.pause()
        assert not tinted(rows_of(app)) and app.chat.transcript.plain_text == plain
        await command(app, pilot, "/guessed maybe")
        assert not tinted(rows_of(app))


@pytest.mark.parametrize("is_remote", [True, False])
async def test_where_nothing_is_known_it_says_so(is_remote: bool) -> None:
    memory = None if is_remote else make_memory_ledger()
    app = FrozenApp(chat_engine(script(), memory=memory))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "Why?")
        await command(app, pilot, "/guessed on")
        words = SERVER_DOES_NOT_SAY if is_remote else GUESSES_NOTHING.replace("`", "")
        shown = " ".join(app.chat.transcript.plain_text.replace("`", "").split())
        assert words in shown and not app.chat.view.tints_drafts


async def test_while_it_streams_too() -> None:
    app = FrozenApp(chat_engine(script(), num_drafts=4, memory=make_memory_ledger()))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready_app(pilot, app)
        await command(app, pilot, "/guessed")
        await ask(app, pilot, "Why?")
        entries = [e for e in app.chat.transcript.entries if isinstance(e, AnswerEntry)]
        await wait_until(pilot, lambda: bool(tinted(rows_of(app))))
        assert entries[0].has_drafted and tinted(rows_of(app)) == ["quick", " answer that"]
