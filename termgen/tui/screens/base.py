"""What the screens share: canvases get their colours from the theme of the moment."""

from __future__ import annotations

from textual.screen import Screen
from textual.theme import Theme

from termgen.tui.palette import Palette
from termgen.tui.widgets.canvas import Canvas
from termgen.tui.widgets.transcript import Transcript


class ThemedScreen(Screen[None]):
    """Follows the app's theme; the breakpoints name the sizes the style sheet speaks of."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (20, "-short"), (34, "-tall"), (48, "-high")]

    palette = Palette({})
    """The colours of the moment."""

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, self._follow_theme)
        self.apply_palette()

    def apply_palette(self) -> None:
        palette = self.palette = Palette.of(self.app)
        for canvas in self.query(Canvas):
            canvas.set_palette(palette)
        for transcript in self.query(Transcript):
            transcript.set_palette(palette)

    def _follow_theme(self, _theme: Theme) -> None:
        self.apply_palette()
