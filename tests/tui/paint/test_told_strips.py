"""Strips that emit only their differences from the strips before them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from told_terminal import CONSOLE, Terminal, shown_of

from termgen.tui.paint.lean_strip import LeanStrip
from termgen.tui.paint.palette import ROLES, Palette
from termgen.tui.paint.spans import Row, row_width

_PIECES = ("word", "  ", "█▒·", "x ", "■■■■■■■■■■■■", "━━━━╸────────", "12 345")


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("CHANGES_SEED", random.randrange(2**32)))
    print(f"CHANGES_SEED={seed}")
    return random.Random(seed)


def random_row(rng: random.Random, roles: list[str], like: Row) -> Row:
    """A random row that shares some pieces with another row."""
    if not like:
        suffixes = ("", "", "@surface", "/b", "/ur")
        return tuple(
            (rng.choice(_PIECES), rng.choice(roles) + rng.choice(suffixes)) for _ in range(12)
        )
    spans = list(like)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(spans))
        text, role = spans[at]
        cut = rng.randrange(len(text) + 1)
        spans[at : at + 1] = rng.choice(
            (
                [(text, rng.choice(roles))],
                [(text[:cut], role), (text[cut:], rng.choice(roles))],
                [(text[:cut] + "#" * (len(text) - cut), role)],
                [(text[::-1], role), ("", role)],
            )
        )
    return tuple(spans)


def test_changes_make_one_row_of_another(rng: random.Random) -> None:
    palette = Palette({"foreground": "#e0e0e0", "background": "#101010", "primary": "#3070f0"})
    roles = sorted(ROLES)
    for _ in range(100):
        row = random_row(rng, roles, ())
        width = row_width(row)
        terminal = Terminal((width + 1, 1))
        strip = palette.strip(row, width)
        terminal.feed(strip.divide([width])[0].render(CONSOLE))
        for _ in range(5):
            row = random_row(rng, roles, row)
            after = palette.strip(row, width)
            assert isinstance(after, LeanStrip) and isinstance(strip, LeanStrip)
            after.follow(strip)
            told = after.divide([width])[0].render(CONSOLE)
            terminal.feed(told + "|")  # in the cell behind the row, wherever the changes ended
            assert terminal.shown()[0][-1][0] == "|"
            assert terminal.shown()[0][:-1] == shown_of([after], (width, 1))[0]
            strip = after


Do = Callable[[LeanStrip], object]


@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(
    "do",
    [
        lambda strip: strip.divide([4, 12]),  # an overlay covers half of it
        lambda strip: strip.divide([12]),  # or all of it: it should have been drawn, and was not
        lambda strip: strip.forget(),
    ],
)
def test_a_strip_is_whole_where_its_place_was_taken(
    do: Do, *, is_drawn: bool, is_last: bool
) -> None:
    palette = Palette({})

    def strip(text: str) -> LeanStrip:
        made = palette.strip(((text[:12], "text"),), 12)
        assert isinstance(made, LeanStrip)
        return made

    def drawn(one: LeanStrip) -> str:
        return one.divide([12])[0].render(CONSOLE)

    old, new, third = strip("a row of text"), strip("a row of more"), strip("a row of much")
    assert "a row of" in drawn(old)
    new.follow(old)
    if is_drawn:
        assert "a row of" not in drawn(new), "only the end differs"
    if do(new) is None:
        do(old)  # all of a canvas are forgotten, the last one drawn among them
    if is_last:
        assert "a row of" in drawn(new)
    else:
        third.follow(new)
        assert "a row of" in drawn(third)


def test_a_strip_that_was_never_drawn_is_not_followed() -> None:
    """Two pictures in one frame; and a chain of undrawn strips does not grow."""
    palette = Palette({})
    strips = [palette.strip(((f"a long row, {i}", "text"),), 13) for i in range(9)]
    first = strips[0]
    assert isinstance(first, LeanStrip)
    first.divide([13])[0].render(CONSOLE)
    for before, after in zip(strips, strips[1:], strict=False):
        assert isinstance(before, LeanStrip) and isinstance(after, LeanStrip)
        after.follow(before)
        assert before._before is None
    last = strips[-1].divide([13])[0].render(CONSOLE)
    assert "a long" not in last and "8" in last, "it follows the one that is shown"
