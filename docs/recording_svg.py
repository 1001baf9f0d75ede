"""Pictures of a terminal that move: frames of rows as one SVG file with CSS keyframes.

The file asks for nothing else, neither fonts nor hosts. Frames stand side by side in a strip, which
moves by one of them at a time; equal rows are defined once. Every run of text has its width, so
that columns stand below one another in any monospaced font.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

CELL_WIDTH, CELL_HEIGHT = 8.4, 17
MARGIN, BAR = 12, 26
"""Around the text, and above it for the title."""
BASELINE = 13
FONT_SIZE = 14
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
BACKGROUND, FOREGROUND, EDGE, TITLE = "#10131a", "#d7dae0", "#3a4150", "#9aa3b2"
DOTS = ("#ff5f57", "#febc2e", "#28c840")


class Style(NamedTuple):
    """Colours as `#rrggbb`; None: those of the terminal."""

    colour: str | None = None
    background: str | None = None
    bold: bool = False
    italic: bool = False
    underline: bool = False


class Cell(NamedTuple):
    text: str
    """Empty for the second half of a wide character."""
    style: Style = Style()


Row = tuple[Cell, ...]
Frame = tuple[Row, ...]


@dataclass(frozen=True)
class Shown:
    """A frame, and how long it is on the screen."""

    frame: Frame
    seconds: float


def runs_of(row: Row) -> list[tuple[int, int, str, Style]]:
    """(first column, columns, text, style) of each part of one style."""
    runs: list[tuple[int, int, str, Style]] = []
    for column, cell in enumerate(row):
        if runs and (not cell.text or runs[-1][3] == cell.style):
            first, columns, text, style = runs[-1]
            runs[-1] = (first, columns + 1, text + cell.text, style)
        else:
            runs.append((column, 1, cell.text, cell.style))
    return runs


class _Sheet:
    """Classes of the styles that are used, each with the shortest name that is left."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, rule: str) -> str:
        return self._names.setdefault(rule, f"c{len(self._names):x}")

    @property
    def css(self) -> str:
        return "".join(f".{name}{{{rule}}}" for rule, name in self._names.items())


def _text_rule(style: Style) -> str:
    rule = f"fill:{style.colour or FOREGROUND}"
    rule += ";font-weight:bold" if style.bold else ""
    rule += ";font-style:italic" if style.italic else ""
    return rule + (";text-decoration:underline" if style.underline else "")


def row_svg(row: Row, sheet: _Sheet) -> str:
    """Empty for a row without ink."""
    parts = []
    for column, columns, text, style in runs_of(row):
        x, width = column * CELL_WIDTH, columns * CELL_WIDTH
        if style.background is not None:
            name = sheet.name(f"fill:{style.background}")
            # A little wider, as edges between neighbours would show.
            size = f'width="{_number(width + 0.3)}" height="{CELL_HEIGHT + 0.3}"'
            parts.append(f'<rect class="{name}" x="{_number(x)}" {size}/>')
        inked = text.strip(" ")
        if inked:
            x += (len(text) - len(text.lstrip(" "))) * CELL_WIDTH
            width -= (len(text) - len(inked)) * CELL_WIDTH
            at = f'x="{_number(x)}" y="{BASELINE}" textLength="{_number(width)}"'
            name = sheet.name(_text_rule(style))
            parts.append(f'<text class="{name}" {at}>{escape(inked, quote=False)}</text>')
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def animated_svg(shown: Sequence[Shown], *, title: str, still: int = 0) -> str:
    """The file. still: the frame for readers who do not want things to move."""
    columns, rows = len(shown[0].frame[0]), len(shown[0].frame)
    inner = columns * CELL_WIDTH
    width, height = inner + 2 * MARGIN, rows * CELL_HEIGHT + MARGIN + BAR
    sheet, ids = _Sheet(), dict[str, str]()
    frames = []
    for number, one in enumerate(shown):
        uses = []
        for place, row in enumerate(one.frame):
            if drawn := row_svg(row, sheet):
                name = ids.setdefault(drawn, f"r{len(ids):x}")
                uses.append(f'<use href="#{name}" y="{place * CELL_HEIGHT}"/>')
        frames.append(f'<g transform="translate({_number(number * width)})">{"".join(uses)}</g>')
    defined = "".join(f'<g id="{name}">{drawn}</g>' for drawn, name in ids.items())
    total = sum(one.seconds for one in shown)
    at, stops = 0.0, []
    for number, one in enumerate(shown):
        stops.append(f"{100 * at / total:.3f}%{{transform:{_moved(number, width)}}}")
        at += one.seconds
    css = (
        f"text{{font:{FONT_SIZE}px {FONTS};white-space:pre}}{sheet.css}"
        f".strip{{animation:play {total:.2f}s step-end infinite}}"
        f"@keyframes play{{{''.join(stops)}}}"
        f"@media(prefers-reduced-motion:reduce){{.strip{{animation:none;"
        f"transform:{_moved(still, width)}}}}}"
    )
    dots = "".join(
        f'<circle cx="{MARGIN + 6 + 18 * i}" cy="{BAR / 2}" r="5" fill="{colour}"/>'
        for i, colour in enumerate(DOTS)
    )
    box = f'width="{_number(width)}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {box} '
        f'viewBox="0 0 {_number(width)} {height}" role="img"><title>{escape(title)}</title>'
        f"<style>{css}</style><defs>{defined}</defs>"
        f'<rect x="0.5" y="0.5" width="{_number(width - 1)}" height="{height - 1}" rx="8" '
        f'fill="{BACKGROUND}" stroke="{EDGE}"/>{dots}'
        f'<text x="{_number(width / 2)}" y="{BAR / 2 + 5}" text-anchor="middle" fill="{TITLE}">'
        f"{escape(title)}</text>"
        f'<svg x="{MARGIN}" y="{BAR}" width="{_number(inner)}" height="{rows * CELL_HEIGHT}">'
        f'<g class="strip">{"".join(frames)}</g></svg></svg>\n'
    )


def _moved(number: int, width: float) -> str:
    return f"translateX({_number(-number * width)}px)" if number else "none"
