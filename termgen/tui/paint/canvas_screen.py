"""Screens of canvases: `ThemedScreen` sets the theme's colours, `CanvasScreen` draws them as one.

A `CanvasScreen` sends the terminal only the cells that differ. It forgets what the terminal shows
after another screen, a resize, or a program that had the terminal meanwhile; the app reports frames
that the driver dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual import on
from textual.containers import Horizontal, Vertical
from textual.events import Resize, ScreenResume
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.theme import Theme

from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.palette import Palette


class Column(Vertical):
    """A column that canvases cover: the screen paints what little of it is left free."""

    def render_lines(self, crop: Region) -> list[Strip]:
        return []


class Line(Horizontal):
    """A row that canvases cover, like `Column`."""

    def render_lines(self, crop: Region) -> list[Strip]:
        return []


class ThemedScreen(Screen[None]):
    """Follows the app's theme; the breakpoints name the sizes the style sheet speaks of."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (20, "-short"), (34, "-tall"), (48, "-high")]

    palette = Palette({})
    """The present colours."""
    _ground: Strip | None = None

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, self._follow_theme)
        self.apply_palette()

    def apply_palette(self) -> None:
        palette = self.palette = Palette.of(self.app)
        self._ground = None
        for canvas in self.query(Canvas):
            canvas.set_palette(palette)

    def render_lines(self, crop: Region) -> list[Strip]:
        """The cells that canvases leave free, mostly none: one strip, kept between frames."""
        if self.palette.mono:
            return super().render_lines(crop)
        if self._ground is None or self._ground.cell_length != crop.width:
            self._ground = Strip.blank(crop.width, self.palette.style("text"))
        return [self._ground] * crop.height

    def _follow_theme(self, _theme: Theme) -> None:
        self.apply_palette()


class CanvasScreen(ThemedScreen):
    _canvases: Sequence[Canvas] = ()
    """Found once: they stay as long as the screen."""

    def on_mount(self) -> None:
        self._canvases = tuple(self.query(Canvas))
        for canvas in self._canvases:
            canvas.tells_changes = True
        self.app.app_resume_signal.subscribe(self, lambda _: self.forget_terminal())

    @on(ScreenResume)
    @on(Resize)
    def forget_terminal(self) -> None:
        """Draw every cell in the next frame: the terminal may show something else."""
        for canvas in self._canvases:
            canvas.forget()

    def draw(self, canvases: Iterable[Canvas]) -> None:
        """Draw the changes of all canvases as one update: a canvas that asks for its own costs two
        messages through Textual."""
        changed = [region for canvas in canvases for region in canvas.take_rows()]
        if changed:
            self.refresh(*changed)
