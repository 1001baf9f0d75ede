"""The themes of some folders, read again when their files change.

The app polls it, from a thread as disks can be slow. A file that is broken is told of once, and
what was read from it before stays.
"""

from __future__ import annotations

from pathlib import Path

from textual.theme import Theme

from termgen.tui.themes import ThemeError, load_all, theme_files


class ThemeShelf:
    """Not for two threads at once."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._themes: dict[str, Theme] = {}
        self._told: set[str] = set()

    def poll(self) -> tuple[list[Theme], list[ThemeError]]:
        """Themes that are new or changed since the last time, and errors not told before."""
        stamps = {path: _stamp(path) for path in theme_files(*self._folders)}
        if stamps == self._stamps:
            return [], []
        self._stamps = stamps
        themes, errors = load_all(*self._folders)
        fresh = [theme for name, theme in themes.items() if self._themes.get(name) != theme]
        self._themes |= themes
        untold = [error for error in errors if str(error) not in self._told]
        self._told = {str(error) for error in errors}
        return fresh, untold


def _stamp(path: Path) -> tuple[int, int]:
    """Time and size; a file that has just gone is read, which says so."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
