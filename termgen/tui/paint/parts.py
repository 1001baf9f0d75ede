"""Rows of a text that may be long, made part by part.

What is in a part is closed: later text changes none of its rows. For another width all of them are
made anew, the last first: as many as a frame has time for, the others by a thread
(`widgets.layout_work`). Until then a part keeps the rows of the width before. Answers, thoughts and
questions are made of these. No Textual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from termgen.tui.paint.spans import Row

Make = Callable[[int], Sequence[Row]]
"""Rows for a width. Needs nothing but what it was given: a thread may call it."""
Job = Callable[[], Callable[[], None]]
"""Makes rows in any thread; the function it returns puts them in place in the screen's thread."""

PART_CHARS = 1024
"""A part stops growing at this many characters."""
JOB_CHARS = 8192
"""Characters laid out by one job."""


class Part:
    def __init__(
        self, make: Make, num_chars: int, *, before: Row = (), shown: Sequence[Row] = ()
    ) -> None:
        """`before` goes before every row. `shown` stand for its rows until they are made."""
        self.make = make
        self.num_chars = num_chars
        self._before = before
        self.rows = list(shown)
        self.width = 0
        """Width of its rows; 0 without any."""

    def grow(self, make: Make, num_chars: int, fresh: Sequence[Row], width: int) -> None:
        """Append rows, which `make` now makes too."""
        self.make = make
        self.num_chars += num_chars
        self.rows += indented(fresh, self._before)
        self.width = width

    def change(self, make: Make, num_chars: int) -> None:
        """Replace all rows of the part."""
        self.make, self.num_chars, self.width = make, num_chars, 0

    def lay_out(self, width: int) -> None:
        self._put(self.make, width, self.make(width))

    def job(self, width: int) -> Job:
        make = self.make

        def run() -> Callable[[], None]:
            rows = make(width)
            return lambda: self._put(make, width, rows)

        return run

    def _put(self, make: Make, width: int, rows: Sequence[Row]) -> None:
        """Take rows that a job has made, unless the part has changed meanwhile."""
        if make is self.make:
            self.rows, self.width = indented(rows, self._before), width


def indented(rows: Sequence[Row], before: Row) -> list[Row]:
    return [(*before, *row) if row else row for row in rows]


def rows_of(parts: Sequence[Part]) -> list[Row]:
    return list(chain.from_iterable(part.rows for part in parts))


def num_chars_to_do(parts: Sequence[Part], width: int) -> int:
    """Characters without rows for this width; 1000 take some 4 ms."""
    return sum(part.num_chars for part in parts if part.width != width)


def lay_out(parts: Sequence[Part], width: int, at_once: int | None) -> int | None:
    """Lay out parts for this width, the last first, at most so many characters; None for all.
    Returns the parts that are left."""
    for part in reversed(parts):
        if part.width != width:
            if at_once is not None:
                if part.num_chars > at_once:
                    return 0
                at_once -= part.num_chars
            part.lay_out(width)
    return at_once


def job_for(parts: Sequence[Part], width: int) -> Job | None:
    """Some of what `lay_out` has left, the last first. None where it has left nothing."""
    jobs: list[Job] = []
    num_chars = 0
    for part in reversed(parts):
        if part.width != width and num_chars < JOB_CHARS:
            jobs.append(part.job(width))
            num_chars += part.num_chars

    def run() -> Callable[[], None]:
        puts = [job() for job in jobs]

        def put() -> None:
            for each in puts:
                each()

        return put

    return run if jobs else None
