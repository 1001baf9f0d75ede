"""Canvas: a widget that shows rows from a pure renderer, redrawing only those that changed.

It answers the compositor with cached strips and skips Textual's style cache, so a frame costs
what its changed rows cost. It therefore takes no border or padding from CSS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from termgen.tui.paint.lean_strip import LeanStrip
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.spans import Row

WHOLE_EVERY = 64
"""Frames after which a row is drawn in full, whatever the terminal is believed to show: this
repairs what another program has written over it."""
Painter = Callable[[int, int], Sequence[Row]]
"""(width, height) -> rows; rows beyond the height are ignored, missing ones are blank."""


class Canvas(Widget):
    """Give it a painter; call `repaint` whenever what the painter reads may have changed."""

    ALLOW_SELECT = False

    def __init__(
        self, painter: Painter, *, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._painter = painter
        self._palette: Palette | None = None
        self._rows: list[Row] = []
        self._strips: list[Strip] = []
        self.tells_changes = False
        """Send only the cells that changed since the last frame. The owner that sets this calls
        `forget` whenever the terminal may show something else than the last frame."""
        self._shown_at = Region()
        self._turn = 0

    def forget(self) -> None:
        """Draw every row in full on the next frame."""
        for strip in self._strips:
            if isinstance(strip, LeanStrip):
                strip.forget()

    def set_palette(self, palette: Palette) -> None:
        """Take a new theme and draw every row again."""
        self._palette = palette
        self._rows, self._strips = [], []
        self.repaint()

    def on_resize(self) -> None:
        self._rows, self._strips = [], []
        self.repaint()

    def repaint(self) -> None:
        """Ask the painter for rows and redraw those that differ from what is shown."""
        if changed := self.take_rows():
            x, y = self.region.offset
            self.refresh(*(region.translate((-x, -y)) for region in changed))

    def take_rows(self) -> list[Region]:
        """Ask the painter for rows, and return the screen regions that changed. The caller
        refreshes them, which lets it draw many canvases at once."""
        x, top, width, height = self.region  # an empty region while hidden
        if self._palette is None or not width or not height:
            return []
        fresh = list(self._painter(width, height))[:height]
        fresh += [()] * (height - len(fresh))
        full = len(self._rows) != height
        changed = [y for y, row in enumerate(fresh) if full or row != self._rows[y]]
        if full:
            self._strips = [Strip.blank(width)] * height
        self._turn += 1
        for y in changed:
            before, strip = self._strips[y], self._palette.strip(fresh[y], width)
            if isinstance(before, LeanStrip) and isinstance(strip, LeanStrip):
                if self.tells_changes and (self._turn + y) % WHOLE_EVERY:
                    strip.follow(before)
            self._strips[y] = strip
        self._rows = fresh
        return [Region(x, top + y, width, rows) for y, rows in _runs(changed)]

    @property
    def text(self) -> str:
        """The visible text, for tests and for copying."""
        return "\n".join(strip.text.rstrip() for strip in self._strips)

    def render_lines(self, crop: Region) -> list[Strip]:
        if not self._strips or self._palette is None:
            blank = self.visual_style.rich_style
            return [Strip.blank(crop.width, blank)] * crop.height
        if self.tells_changes and self.region != self._shown_at:
            self._shown_at = self.region
            self.forget()
        filters = self.get_line_filters() if self._palette.mono else ()
        background = self._palette.color("background")
        whole = crop.x == 0 and crop.width == self.outer_size.width
        if whole and not filters and crop.y == 0 and crop.height == len(self._strips):
            return self._strips
        out: list[Strip] = []
        for y in range(crop.y, crop.bottom):
            if y >= len(self._strips):
                out.append(Strip.blank(crop.width, self._palette.style("text")))
                continue
            strip = self._strips[y]
            for line_filter in filters:
                strip = strip.apply_filter(line_filter, background)
            out.append(strip if whole else strip.crop(crop.x, crop.right))
        return out


def _runs(lines: Sequence[int]) -> list[tuple[int, int]]:
    """First line and length of each run of adjacent lines; `lines` is sorted."""
    runs: list[tuple[int, int]] = []
    for y in lines:
        if runs and sum(runs[-1]) == y:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((y, 1))
    return runs
