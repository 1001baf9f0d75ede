"""A screen of canvases that are drawn together, and told to the terminal by the cells that differ.

It knows when a terminal may show something else than what was drawn last: after another screen, a
resize, or a program that had the terminal meanwhile. Frames that the driver threw away it is told
of by the app.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual import on
from textual.events import Resize, ScreenResume

from termgen.tui.screens.base import ThemedScreen
from termgen.tui.widgets.canvas import Canvas


class BoardScreen(ThemedScreen):
    _canvases: Sequence[Canvas] = ()
    """They stay: no frame looks for them."""

    def on_mount(self) -> None:
        self._canvases = tuple(self.query(Canvas))
        for canvas in self._canvases:
            canvas.tells_changes = True
        self.app.app_resume_signal.subscribe(self, lambda _: self.forget_terminal())

    @on(ScreenResume)
    @on(Resize)
    def forget_terminal(self) -> None:
        """It may show something else than what was drawn last."""
        for canvas in self._canvases:
            canvas.forget()

    def draw(self, canvases: Iterable[Canvas]) -> None:
        """What changed of them is one update of the screen: a canvas that asks for its own is two
        messages through Textual."""
        changed = [region for canvas in canvases for region in canvas.take_rows()]
        if changed:
            self.refresh(*changed)
