"""Fills token masks in threads; the engine thread waits for some of them.

Rows that land together and have had quick masks form one job, as handing over a job takes longer
than most masks. A row with a slow mask is a separate job for a while, longer every time; while its
last mask was slow it uses a second thread pool, so that such rows cannot block the others. Used by
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
"""From this many rows on, a job's masks are filled in one call."""
SLOW_S = 0.005
"""A mask that takes longer counts as slow. Most take microseconds."""


class MaskFiller:
    """Threads own a row from `begin` until it `is_ready`."""

    def __init__(self) -> None:
        self._threads = DaemonThreads(NUM_THREADS, "termgen-masks")
        self._slow_threads = DaemonThreads(NUM_SLOW_THREADS, "termgen-slow-masks")
        self._progress = threading.Condition()
        self._awaited: set[GrammarState] = set()
        """Rows that the engine thread waits for; guarded by `_progress`, as are the flags of rows
        that threads own."""
        self._watched: set[GrammarState] = set()
        self._watched_ready: list[GrammarState] = []
        """Guarded by `_progress`, like `_watched`."""

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
        """Fill the next mask of each row."""
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
        except RuntimeError:  # the system has no thread left: fill in this one
            fill(rows)

    def wait(self, rows: Iterable[GrammarState], timeout_s: float) -> None:
        """Wait until all rows are ready, or for the timeout. Late rows count as slow, so that each
        mask is waited for only once."""
        with self._progress:
            self._awaited = {row for row in rows if not row.is_ready}
            if self._awaited:
                self._progress.wait_for(lambda: not self._awaited, timeout_s)
            for row in self._awaited:
                row.is_slow = True
            self._awaited = set()

    def wait_for_any(self, timeout_s: float) -> None:
        """Wait until some row becomes ready, or for the timeout."""
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
        """Mark rows as ready. `_progress` is held."""
        for row in rows:
            row.is_ready = True
        if self._watched:
            self._watched_ready += self._watched.intersection(rows)
            self._watched.difference_update(rows)
        self._awaited.difference_update(rows)
        if not self._awaited:
            self._progress.notify()
