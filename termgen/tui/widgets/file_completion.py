"""The list of files above the prompt while an `@path` is being written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from textual import work

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
        self._partial: str | None = None
        """What is being completed."""
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
        was_open, self._partial = self._partial is not None, open_mention(before)
        if self._partial is None:
            self.close()
        elif self._files is not None:
            self._show(self._partial, self._files)
        elif not was_open:
            self._find_files()

    @work(exclusive=True)
    async def _find_files(self) -> None:
        """Not on the loop: a disk may be slow."""
        files = await asyncio.to_thread(files_below, Path())
        if self._partial is not None:
            self._files = files
            self._show(self._partial, files)

    def _show(self, partial: str, files: Sequence[str]) -> None:
        found = completions(partial, files)
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
        self._files, self._partial, self._found = None, None, []
        self.workers.cancel_node(self)
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
