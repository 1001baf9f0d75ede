"""A minimal terminal that receives incremental updates."""

from __future__ import annotations

import re
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from textual.strip import Strip

_TOKEN = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|(\n)|([^\x1b\n])")
CONSOLE = Console(color_system="truecolor", force_terminal=True)


class Terminal:
    """Understands what the app emits: cursor moves, colours, text. Its contents are unknown at
    first and after a resize."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.resize(size)

    def resize(self, size: tuple[int, int]) -> None:
        self.size = size
        self.cells = {(x, y): "?" for x in range(size[0]) for y in range(size[1])}
        self.styles: dict[tuple[int, int], tuple[str, ...]] = {}

    def feed(self, data: str) -> None:
        x, y, pen = 0, 0, {"f": "", "b": ""}
        for code, kind, newline, char in _TOKEN.findall(data):
            if kind == "H":
                y, x = (int(part) - 1 for part in code.split(";"))
            elif kind == "C":
                x = min(self.size[0] - 1, x + int(code or 1))
            elif kind == "m":
                self._colour(pen, code.split(";"))
            elif newline:
                y += 1
            elif char:
                self.cells[x, y] = char
                colour = "" if char == " " and len(pen) == 2 else pen["f"]
                self.styles[x, y] = (pen["b"], colour, *sorted(pen.keys() - {"f", "b"}))
                x += cell_len(char)

    def _colour(self, pen: dict[str, str], parts: list[str]) -> None:
        while parts:
            part = parts.pop(0)
            if part == "0":
                pen.clear()
                pen |= {"f": "", "b": ""}
            elif part in ("38", "48"):
                number = 4 if parts[0] == "2" else 2
                pen["f" if part == "38" else "b"] = ";".join(parts[:number])
                del parts[:number]
            else:
                pen[part] = ""

    def shown(self) -> list[list[tuple[Any, ...]]]:
        width, height = self.size
        return [
            [(self.cells[x, y], *self.styles.get((x, y), ())) for x in range(width)]
            for y in range(height)
        ]


def shown_of(strips: list[Strip], size: tuple[int, int]) -> list[list[tuple[Any, ...]]]:
    """The screen after Textual's own full update with these strips."""
    terminal = Terminal(size)
    for y, strip in enumerate(strips):
        terminal.feed(f"\x1b[{y + 1};1H" + Strip(list(strip)).render(CONSOLE))
    return terminal.shown()
