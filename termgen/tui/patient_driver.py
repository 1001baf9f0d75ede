"""A terminal that nobody reads must not stop the engine.

Textual writes to the terminal in a thread, and its loop waits once thirty writes are queued there.
That loop is the engine's too: a window that is held with Ctrl-S, a suspended `tmux`, or a slow
connection would hold up every answer. This driver never waits. While the queue is long it throws
frames away, and `TermgenApp` draws the whole screen again once there is room.
"""

from __future__ import annotations

import termios
from contextlib import suppress

from textual.drivers.linux_driver import LinuxDriver

MOST_QUEUED = 20
"""Writes. A start and an end take ten or so at once, and a frame two or three."""

LONGEST_CLOSE_S = 2.0


class PatientDriver(LinuxDriver):
    """LinuxDriver whose `write` returns at once."""

    has_dropped = False
    """Whether what is on the screen is not what was drawn last."""

    @property
    def is_behind(self) -> bool:
        """Whether the terminal does not take what it is given."""
        writer = self._writer_thread
        return writer is not None and writer._queue.qsize() >= MOST_QUEUED

    def write(self, data: str) -> None:
        if self.is_behind:
            self.has_dropped = True
        else:
            super().write(data)

    def close(self) -> None:
        """Write out what is queued, as far as that does not take long: the thread ends with us."""
        writer = self._writer_thread
        if writer is None:
            return
        if not self.is_behind:
            writer._queue.put(None)
            writer.join(LONGEST_CLOSE_S)
        if writer.is_alive() and self.attrs_before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)
