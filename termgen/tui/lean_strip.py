"""A strip that is written to the terminal in few bytes: colours are set where they change.

Textual sets every attribute anew for every piece of a line, and takes all of them back behind it:
40 bytes a piece, most of the bytes of a frame. Made by the palette. A piece that is cut from a
strip is one of Textual's own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from textual.strip import Strip

_RESET = "\x1b[0m"
_MARK = "\0"


class _Pen(NamedTuple):
    """What a terminal is told for a style."""

    whole: str
    """When nothing is set yet."""
    ground: str
    """The background alone."""
    colour: str
    """The text's colour alone."""
    is_plain: bool
    """It has no attributes but its colours."""


class LeanStrip(Strip):
    """Drawn as a `Strip` of the same segments is."""

    def render(self, console: Console) -> str:
        if self._render_cache is None:
            self._render_cache = self._lean(console._color_system or ColorSystem.TRUECOLOR)
        return self._render_cache

    def _lean(self, system: ColorSystem) -> str:
        out: list[str] = []
        set_now: _Pen | None = None
        pens = _pens(system)
        for text, style, _ in self._segments:
            pen = pens[style or Style.null()]
            if set_now is None:
                out += [pen.whole, text]
            elif not (pen.is_plain and set_now.is_plain and pen.ground == set_now.ground):
                out += [_RESET, pen.whole, text]
            elif pen.colour == set_now.colour or text.isspace():
                out.append(text)  # and the colour of blanks is not seen
                continue
            else:
                out += [pen.colour, text]
            set_now = pen
        return "".join(out) + _RESET


class _Pens(dict[Style, _Pen]):
    """Of every style that was drawn so far; palettes have some dozens."""

    def __init__(self, system: ColorSystem) -> None:
        super().__init__()
        self._system = system

    def __missing__(self, style: Style) -> _Pen:
        def told(part: Style) -> str:
            return part.render(_MARK, color_system=self._system).partition(_MARK)[0]

        ground, colour = Style(bgcolor=style.bgcolor), Style(color=style.color)
        is_plain = style == Style(color=style.color, bgcolor=style.bgcolor)
        pen = self[style] = _Pen(told(style), told(ground), told(colour), is_plain)
        return pen


@lru_cache
def _pens(system: ColorSystem) -> _Pens:
    return _Pens(system)
