"""No echo of keys that are pressed before a screen is drawn: they would stand in its way.

They are not lost: the screen reads them when it begins.
"""

from __future__ import annotations

import sys
from typing import Any

_before: list[Any] | None = None
"""The terminal's settings, while its echo is off."""


def hide_typing() -> None:
    """Turn the echo of standard input off, if it is a terminal, until `show_typing`."""
    global _before
    try:
        import termios
    except ImportError:  # Windows
        return
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError, ValueError):
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    _before = before


def show_typing() -> None:
    """Put back what was there before. Idempotent."""
    global _before
    before, _before = _before, None
    if before is None:
        return
    import termios

    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
    except (termios.error, OSError, ValueError):
        return  # the terminal is gone
