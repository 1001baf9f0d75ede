"""Owns the masks in flight: threads fill them, the engine's thread waits for some.

Rows that land together and whose masks have been quick are one job: handing over costs more than
most masks. A row that took long is a job of its own for a while, longer every time, and as long as
its last mask was slow it has other threads, so that such rows do not take all of them. Used by
`Constraints`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial

from termgen.system.cpu_slices import long_slices
from termgen.system.daemon_threads import DaemonThreads
from termgen.vocabulary.token_mask import GrammarState

NUM_THREADS = 2
NUM_SLOW_THREADS = 2
MANY = 8
"""Of so many rows that land together the masks are filled all at once."""
SLOW_S = 0.005
"""A mask that takes longer is slow. Most take some microseconds."""


class MaskFiller:
    """A row is with the threads from `begin` until it `is_ready`."""

    def __init__(self) -> None:
        self._threads = DaemonThreads(NUM_THREADS, "termgen-masks")
        self._slow_threads = DaemonThreads(NUM_SLOW_THREADS, "termgen-slow-masks")
        self._progress = threading.Condition()
        self._awaited: set[GrammarState] = set()
        """Rows that the engine's thread waits for now; guarded by `_progress`, as are the flags of
        rows that are with the threads."""
        self._watched: set[GrammarState] = set()
        self._watched_ready: list[GrammarState] = []
        """Both guarded by `_progress`."""

    def watch(self, row: GrammarState) -> None:
        """Have `take_watched` return this row once it is ready."""
        with self._progress:
            if row.is_ready:
                self._watched_ready.append(row)
            else:
                self._watched.add(row)

    def take_watched(self) -> list[GrammarState]:
        """Watched rows that have become ready since the last call."""
        if not self._watched_ready:
            return []
        with self._progress:
            ready, self._watched_ready = self._watched_ready, []
        return ready

    def begin(self, rows: Iterable[GrammarState]) -> None:
        """Fill the next mask of each."""
        together = []
        for row in rows:
            row.is_ready = False
            if row.is_slow:
                self._hand_over(self._slow_threads, [row])
            elif row.may_share:
                together.append(row)
            else:
                self._hand_over(self._threads, [row])
        if together:
            self._hand_over(self._threads, together)

    def _hand_over(self, threads: DaemonThreads, rows: list[GrammarState]) -> None:
        fill = self._fill_slowly if threads is self._slow_threads else self._fill
        try:
            threads.submit(partial(fill, rows))
        except RuntimeError:  # the system has no thread left, and these requests wait
            fill(rows)

    def wait(self, rows: Iterable[GrammarState], timeout_s: float) -> None:
        """Until all of these are ready or the time is over. Those that are late count as slow, so
        that a mask is waited for once."""
        with self._progress:
            self._awaited = {row for row in rows if not row.is_ready}
            if self._awaited:
                self._progress.wait_for(lambda: not self._awaited, timeout_s)
            for row in self._awaited:
                row.is_slow = True
            self._awaited = set()

    def wait_for_any(self, timeout_s: float) -> None:
        """Until some row becomes ready or the time is over."""
        with self._progress:
            self._progress.wait(timeout_s)

    def _fill_slowly(self, rows: list[GrammarState]) -> None:
        with long_slices():
            self._fill(rows)

    def _fill(self, rows: list[GrammarState]) -> None:
        if len(rows) >= MANY:
            self._fill_many(rows)
            return
        for row in rows:
            began = time.perf_counter()
            row.fill()
            took_s = time.perf_counter() - began
            with self._progress:
                row.note_time(is_slow=took_s > SLOW_S)
                self._hand_back([row])

    def _fill_many(self, rows: list[GrammarState]) -> None:
        began = time.perf_counter()
        GrammarState.fill_together(rows)
        is_slow = time.perf_counter() - began > SLOW_S
        with self._progress:
            for row in rows:
                if is_slow:
                    row.note_slow_company()
                else:
                    row.note_time(is_slow=False)
            self._hand_back(rows)

    def _hand_back(self, rows: list[GrammarState]) -> None:
        """With `_progress` held."""
        for row in rows:
            row.is_ready = True
        if self._watched:
            self._watched_ready += self._watched.intersection(rows)
            self._watched.difference_update(rows)
        self._awaited.difference_update(rows)
        if not self._awaited:
            self._progress.notify()
