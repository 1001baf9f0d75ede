"""What the screens share: canvases get their colours from the theme of the moment."""

from __future__ import annotations

from textual.containers import Horizontal, Vertical
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.theme import Theme

from termgen.tui.palette import Palette
from termgen.tui.widgets.canvas import Canvas
from termgen.tui.widgets.transcript import Transcript


class Column(Vertical):
    """Of canvases, which cover it: what little of it is seen is the screen's ground, which the
    screen draws where nobody else does."""

    def render_lines(self, crop: Region) -> list[Strip]:
        return []


class Line(Horizontal):
    """As a `Column`."""

    def render_lines(self, crop: Region) -> list[Strip]:
        return []


class ThemedScreen(Screen[None]):
    """Follows the app's theme; the breakpoints name the sizes the style sheet speaks of."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (20, "-short"), (34, "-tall"), (48, "-high")]

    palette = Palette({})
    """The colours of the moment."""
    _ground: Strip | None = None

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, self._follow_theme)
        self.apply_palette()

    def apply_palette(self) -> None:
        palette = self.palette = Palette.of(self.app)
        self._ground = None
        for canvas in self.query(Canvas):
            canvas.set_palette(palette)
        for transcript in self.query(Transcript):
            transcript.set_palette(palette)

    def render_lines(self, crop: Region) -> list[Strip]:
        """What the canvases leave free, mostly nothing: one strip that is kept between frames."""
        if self.palette.mono:
            return super().render_lines(crop)
        if self._ground is None or self._ground.cell_length != crop.width:
            self._ground = Strip.blank(crop.width, self.palette.style("text"))
        return [self._ground] * crop.height

    def _follow_theme(self, _theme: Theme) -> None:
        self.apply_palette()
