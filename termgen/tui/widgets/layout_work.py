"""Entries of the transcript that take long to become rows, as a long answer does for a new width.

They are laid out by a thread, which lets the screen's have its turn every tenth of a millisecond,
so that no frame waits for a table of a thousand rows. Only what makes rows of a text runs there;
all that the entries remember is changed by the screen's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from termgen.tui.parts import Job
from termgen.tui.spans import Row

AT_ONCE = 2048
"""Characters that are laid out in a frame, in some 8 ms; the rest is the thread's."""


@runtime_checkable
class LongEntry(Protocol):
    """Tells how long it will take, and can be laid out elsewhere."""

    def __call__(self, width: int, *, at_once: int | None = None) -> Sequence[Row]:
        """At most so many characters are laid out, if it is given, the last ones. The others have
        the rows they had; none at all where there are none yet."""

    def num_chars_to_do(self, width: int) -> int:
        """0: its rows are there."""

    def job(self, width: int) -> Job | None:
        """Of some of what is to be done, the last first."""


class LayoutWork:
    """Which entries are still to be laid out, the last one to come first."""

    def __init__(self, done: Callable[[LongEntry], None]) -> None:
        """`done` is told of each that was laid out; another width may be wanted by then."""
        self._done = done
        self._waiting: dict[LongEntry, int] = {}
        """With the width."""
        self.is_running = False
        """Set by whoever calls `run`."""

    def add(self, entry: LongEntry, width: int) -> None:
        self._waiting.pop(entry, None)  # it comes first now
        self._waiting[entry] = width

    def clear(self) -> None:
        self._waiting.clear()

    async def run(self) -> None:
        """Until nothing waits."""
        try:
            while self._waiting:
                entry, width = self._waiting.popitem()
                job = entry.job(width)
                if job is not None:
                    put = await asyncio.to_thread(job)
                    put()
                self._done(entry)
        finally:
            self.is_running = False
