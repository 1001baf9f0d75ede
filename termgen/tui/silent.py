"""The screen in the engine screen's place when a chat's server shows nothing of its engine."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Footer

from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.canvas_screen import ThemedScreen
from termgen.tui.paint.sanitize import clean
from termgen.tui.paint.spans import Row, row_width, wrap

MAX_WIDTH = 72
HEADLINE = "This server tells nothing of its engine."
ADVICE = (
    "The chat works all the same. Steps, batches and the KV cache can be watched where the server "
    "is termgen and lets you: a server with API keys shows them to its administrator, who sets "
    "TERMGEN_ADMIN_KEY."
)


class SilentScreen(ThemedScreen):
    BINDINGS = [
        Binding(
            "f2,1,escape",
            "app.show('chat')",
            "Chat",
            id="silent.chat",
            tooltip="Back to the chat",
        )
    ]

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint, id="silent")
        yield Footer(show_command_palette=False)

    def close(self) -> None:
        """Do nothing: like a dashboard's `close`, but there is no feed."""

    def _paint(self, width: int, height: int) -> Sequence[Row]:
        return silent_rows(self._reason, width, height)


def silent_rows(reason: str, width: int, height: int) -> list[Row]:
    """The reason, in the middle of the screen."""
    room = max(1, min(MAX_WIDTH, width - 4))
    rows: list[Row] = [(("▍", "accent"), ("termgen", "accent/b")), ()]
    for text, role in ((HEADLINE, "text/b"), (clean(reason), "warn"), (ADVICE, "muted")):
        rows += [*wrap([(text, role)], room), ()]
    left = " " * max(0, (width - max(map(row_width, rows))) // 2)
    above: list[Row] = [()] * max(0, (height - len(rows)) // 2)
    return [*above, *(((left, "text"), *row) if row else () for row in rows)]
