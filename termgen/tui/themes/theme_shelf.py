"""The themes of some folders, read again when their files change.

The app polls it, from a thread as disks can be slow. A broken file is reported once, and the theme
that was read from it before stays.
"""

from __future__ import annotations

from pathlib import Path

from textual.theme import Theme

from termgen.tui.themes.theme_files import ThemeError, load_all, theme_files


class ThemeShelf:
    """Not for two threads at once."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._themes: dict[str, Theme] = {}
        self._reported: set[str] = set()

    def poll(self) -> tuple[list[Theme], list[ThemeError]]:
        """Themes that are new or changed since the last time, and errors not reported before."""
        stamps = {path: _stamp(path) for path in theme_files(*self._folders)}
        if stamps == self._stamps:
            return [], []
        self._stamps = stamps
        themes, errors = load_all(*self._folders)
        fresh = [theme for name, theme in themes.items() if self._themes.get(name) != theme]
        self._themes |= themes
        unreported = [error for error in errors if str(error) not in self._reported]
        self._reported = {str(error) for error in errors}
        return fresh, unreported


def _stamp(path: Path) -> tuple[int, int]:
    """Time and size; a file that has just gone is read, which says so."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
