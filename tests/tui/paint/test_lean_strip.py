"""Compact strips: they look the same as Textual's own."""

from __future__ import annotations

import random

import pytest
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from textual.strip import Strip

from termgen.tui.paint.palette import ROLES, Palette
from termgen.tui.paint.spans import Row, row_width

VARIABLES = {"foreground": "#e0e0e0", "background": "#101010", "primary": "#3070f0"}
ATTRIBUTES = ("bold", "italic", "underline", "strike", "reverse")


def shown(ansi: str) -> list[tuple[object, ...]]:
    """The visible properties of each cell: a blank has no text colour."""
    text = AnsiDecoder().decode_line(ansi)
    cells: list[tuple[object, ...]] = []
    console = Console(color_system="truecolor", width=500)
    for segment in text.render(console):
        style = segment.style or Style.null()
        attributes = [name for name in ATTRIBUTES if getattr(style, name)]
        for char in segment.text:
            colour = style.color if attributes or not char.isspace() else None
            cells.append((char, colour, style.bgcolor, *attributes))
    return cells


@pytest.mark.parametrize("system", ["truecolor", "256", "standard"])
def test_they_show_what_usual_strips_show(system: str) -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    console = Console(color_system=system)  # type: ignore[arg-type]
    palette, roles = Palette(VARIABLES), sorted(ROLES)
    num_bytes = [0, 0]
    for _ in range(60):
        row: Row = tuple(
            (
                rng.choice(("word", "  ", "█▒", "x ", "数")),
                rng.choice(roles)
                + rng.choice(("", "", "", "@surface"))
                + rng.choice(("", "", "/b", "/ur", "/is")),
            )
            for _ in range(rng.randrange(1, 12))
        )
        width = row_width(row) + rng.randrange(-1, 5)
        lean = palette.strip(row, width)
        usual = Strip(list(lean), lean.cell_length)
        assert lean.cell_length == width
        assert shown(lean.render(console)) == shown(usual.render(console))
        num_bytes[0] += len(lean.render(console))
        num_bytes[1] += len(usual.render(console))
    assert num_bytes[0] < num_bytes[1]


def test_a_colour_is_told_once() -> None:
    palette = Palette(VARIABLES)
    row: Row = (("a", "text"), ("  ", "muted"), ("b", "text"), ("c", "muted"))
    told = palette.strip(row, 8).render(Console(color_system="truecolor"))
    assert told.count("\x1b[") == 3  # both colours of the first, the last one's, and the end
    assert told.startswith("\x1b[38;2;224;224;224;48;2;16;16;16ma  b\x1b[38;2;")
    assert told.endswith("c   \x1b[0m")
