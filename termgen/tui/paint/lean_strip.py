"""A row of spans as a strip that is written to the terminal in few bytes, at little cost.

Colours are sent where they change; Textual sets every attribute anew for every piece of a line and
resets all of them behind it. A strip that follows another sends only the cells that differ, as long
as the terminal shows that other one. The palette makes strips; segments are made when Textual asks
for them, and a piece cut from a strip is one of Textual's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from termgen.tui.paint.spans import Row, Span, is_simple, row_text

_RESET = "\x1b[0m"
_MARK = "\0"
_LONG = 12
"""Cells from which a piece of one colour is searched for its changed part."""


class _Pen(NamedTuple):
    """Escape sequences of a role."""

    whole: str
    """Sequence to use when no attribute is set."""
    ground: str
    """The background alone."""
    colour: str
    """The text's colour alone."""
    is_plain: bool
    """True if the role has no attributes but colours."""


class _Pens(dict[str, _Pen]):
    """Pens of the roles drawn so far; palettes have some dozens."""

    def __init__(self, style: Callable[[str], Style], system: ColorSystem) -> None:
        super().__init__()
        self._style = style
        self._system = system

    def __missing__(self, role: str) -> _Pen:
        def codes(part: Style) -> str:
            return part.render(_MARK, color_system=self._system).partition(_MARK)[0]

        style = self._style(role)
        ground, colour = Style(bgcolor=style.bgcolor), Style(color=style.color)
        is_plain = style == Style(color=style.color, bgcolor=style.bgcolor)
        pen = self[role] = _Pen(codes(style), codes(ground), codes(colour), is_plain)
        return pen


class Inks:
    """The roles of a palette: as styles, and as escape sequences."""

    def __init__(self, style: Callable[[str], Style]) -> None:
        self.style = style
        self._pens: dict[ColorSystem, _Pens] = {}

    def pens(self, system: ColorSystem | None) -> _Pens:
        system = system or ColorSystem.TRUECOLOR
        found = self._pens.get(system)
        if found is None:
            found = self._pens[system] = _Pens(self.style, system)
        return found


class LeanStrip(Strip):
    """Shows what a `Strip` of the same spans does."""

    __slots__ = ("_before", "_inks", "_is_composed", "_is_shown", "_is_simple", "_row", "_width")

    def __init__(self, row: Row, width: int, inks: Inks) -> None:
        """row: spans of `width` cells in all. The slots of a `Strip` stay empty until one is
        asked for."""
        self._row = row
        self._width = width
        self._inks = inks
        self._before: LeanStrip | None = None
        self._is_composed = False
        """True if the strip was requested and not drawn since: a widget may cover it."""
        self._is_shown = False
        """True if the terminal shows this strip in its place."""
        self._is_simple: bool | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in Strip.__slots__:
            raise AttributeError(name)
        style = self._inks.style
        Strip.__init__(self, [Segment(text, style(role)) for text, role in self._row], self._width)
        return getattr(self, name)

    @property
    def cell_length(self) -> int:
        return self._width

    @property
    def is_simple(self) -> bool:
        """True if every character has one cell; other rows are sent whole."""
        if self._is_simple is None:
            self._is_simple = is_simple(row_text(self._row))
        return self._is_simple

    def follow(self, before: LeanStrip) -> None:
        """Take the place of another strip on the screen."""
        if not before._is_composed:
            self._before = before._before or before
        before._before = None

    def forget(self) -> None:
        """Others have drawn in its place."""
        self._before, self._is_shown = None, False

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """Textual asks for this whenever the line is drawn, and then for `render`, unless another
        widget covers it."""
        cuts = list(cuts)
        is_whole = cuts == [self._width]
        if self._is_composed or not is_whole:
            self._before = None
        self._is_composed, self._is_shown = True, False
        return (self,) if is_whole else super().divide(cuts)

    def render(self, console: Console) -> str:
        before, self._before = self._before, None
        self._is_composed, self._is_shown = False, True
        pens = self._inks.pens(console._color_system)
        if before is not None and before._is_shown:
            before._is_shown = False
            if before.is_simple and self.is_simple:
                return _codes(_changes(before._row, self._row), pens)
        return _codes(self._row, pens)


def _codes(row: Iterable[Span | int], pens: _Pens) -> str:
    """Text and escape sequences of the spans. A number skips as many cells."""
    out: list[str] = []
    set_now: _Pen | None = None
    for span in row:
        if isinstance(span, int):
            if span:
                out.append(f"\x1b[{span}C")
            continue
        text, role = span
        pen = pens[role]
        if pen is set_now:
            out.append(text)
            continue
        if set_now is None:
            out += (pen.whole, text)
        elif not (pen.is_plain and set_now.is_plain and pen.ground == set_now.ground):
            out += (_RESET, pen.whole, text)
        elif pen.colour == set_now.colour or text.isspace():
            out.append(text)  # and the colour of blanks is not seen
            continue
        else:
            out += (pen.colour, text)
        set_now = pen
    if set_now is not None:
        out.append(_RESET)
    return "".join(out)


def _changes(old: Row, new: Row) -> list[Span | int]:
    """The spans of `new` that differ from `old`, and numbers of equal cells between them.

    The rows have the same width, and one cell for each character.
    """
    out: list[Span | int] = []
    spans, same = iter(old), 0
    was = was_role = ""
    for text, role in new:
        while text:
            while not was:
                was, was_role = next(spans)
            length = min(len(text), len(was))
            part, was_part = text[:length], was[:length]
            text, was = text[length:], was[length:]
            if role == was_role:
                if part == was_part:
                    same += length
                    continue
                if length >= _LONG:
                    first, end = _bounds(was_part, part)
                    out += (same + first, (part[first:end], role))
                    same = length - end
                    continue
            if same:
                out.append(same)
                same = 0
            out.append((part, role))
    return [*out, same] if same else out


def _bounds(old: str, new: str) -> tuple[int, int]:
    """Bounds of the part in which two texts of one length differ."""
    first, end = 0, len(new)
    while old[first] == new[first]:
        first += 1
    while old[end - 1] == new[end - 1]:
        end -= 1
    return first, end
