"""The list of files above the prompt while an `@path` is being written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from termgen.tui.attachments import completions, files_below, open_mention
from termgen.tui.sanitize import clean_line
from termgen.tui.spans import Row, cut
from termgen.tui.widgets.canvas import Canvas


class FileCompletion(Canvas):
    """Hidden while nothing is being completed. The prompt asks it; it never takes the focus."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(self._paint, id=id)
        self._files: list[str] | None = None
        """Those below the working folder, as of when the list opened."""
        self._found: list[str] = []
        self._selected = 0
        self.display = False

    @property
    def is_open(self) -> bool:
        return bool(self._found)

    @property
    def selected(self) -> str:
        return self._found[self._selected]

    def look(self, before: str) -> None:
        """Show what the path at the end of this text may become, if there is one."""
        partial = open_mention(before)
        if partial is None:
            self.close()
            return
        if self._files is None:
            self._files = files_below(Path())
        found = completions(partial, self._files)
        if found == [partial]:
            found = []  # written out already
        if found != self._found:
            self._found, self._selected = found, 0
        self.display = bool(found)
        self.styles.height = len(found)
        self.repaint()

    def move(self, by: int) -> None:
        self._selected = (self._selected + by) % len(self._found)
        self.repaint()

    def close(self) -> None:
        self._files, self._found = None, []
        self.display = False

    def _paint(self, width: int, _height: int) -> Sequence[Row]:
        rows: list[Row] = []
        for index, path in enumerate(self._found):
            chosen = index == self._selected
            sign = ("▸ ", "accent") if chosen else ("  ", "text")
            name = cut(clean_line(path), max(1, width - 18))
            hint = [("  tab takes it", "faint")] if chosen else []
            rows.append((sign, (name, "accent" if chosen else "muted"), *hint))
        return rows
