"""A text field that shows control characters instead of sending them to the terminal.

Its text may come from an imported chat or a file name. The text itself is not changed.
"""

from __future__ import annotations

from rich.text import Text
from textual.widgets import TextArea

from termgen.tui.paint.sanitize import clean_in_place


class SafeTextArea(TextArea):
    def get_line(self, line_index: int) -> Text:
        return Text(clean_in_place(self.document.get_line(line_index)), end="", no_wrap=True)
