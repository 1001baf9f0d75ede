"""Fills token masks, in threads or, where they have always been quick, in the engine thread itself.

Rows that land together and have had quick masks form one job, as handing over a job takes longer
than most masks. A row with a slow mask is a separate job for a while, longer every time; while its
last mask was slow it uses a second thread pool, so that such rows cannot block the others. Masks of
rows on the device are posted there at once. Used by `Constraints`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial

import numpy as np

from termgen.system.cpu_slices import long_slices
from termgen.system.daemon_threads import DaemonThreads
from termgen.vocabulary.token_mask import GrammarState, IntArray, MaskReceiver

NUM_THREADS = 2
NUM_SLOW_THREADS = 2
MANY = 8
"""From this many rows on, a job's masks are filled in one call."""
MOST_HERE = 64
"""Rows whose masks are filled in the engine thread, at most: more take longer than it takes to wake
another thread, twice, and to pass the GIL to it and back."""
LONG_HERE_S = 0.002
"""A fill in the engine thread that takes longer holds up the other rows."""
REST_FACTOR = 200
"""Then no masks are filled there for so many times as long: that costs 0.5% of the time at most."""
SLOW_S = 0.005
"""A mask that takes longer counts as slow. Most take microseconds."""


class MaskFiller:
    """Threads own a row from `begin` until it `is_ready`."""

    def __init__(self) -> None:
        self.receiver: MaskReceiver | None = None
        """Where filled masks are posted; None: nowhere."""
        self.most_forced = 0
        """Forced tokens that are posted with a mask, at most."""
        self._threads = DaemonThreads(NUM_THREADS, "termgen-masks")
        self._slow_threads = DaemonThreads(NUM_SLOW_THREADS, "termgen-slow-masks")
        self._rests_until_s = 0.0
        """perf_counter until which no masks are filled in the engine thread."""
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
        proven = [row for row in together if row.is_proven]
        if proven and len(proven) <= MOST_HERE and time.perf_counter() >= self._rests_until_s:
            together = [row for row in together if not row.is_proven]
            self._fill_here(proven)
        if together:
            self._hand_over(self._threads, together)

    def _hand_over(self, threads: DaemonThreads, rows: list[GrammarState]) -> None:
        fill = self._fill_slowly if threads is self._slow_threads else self._fill
        try:
            threads.submit(partial(fill, rows))
        except RuntimeError:  # the system has no thread left: fill in this one
            fill(rows)

    def seat(self, row: GrammarState, slot: int, position: int) -> None:
        """Post the row's mask, which is ready, for this slot, and later ones when they are filled.
        position: of its next token, among the row's tokens."""
        with self._progress:
            assert row.is_ready
            row.slot, row.position = slot, position
            self._post([row])

    def unseat(self, row: GrammarState) -> None:
        """Post no further mask of this row: it loses its slot. Steps in flight do not wait."""
        with self._progress:
            slot, row.slot = row.slot, -1
            if self.receiver is not None:
                self.receiver.withhold_masks(np.asarray([slot], np.int32))

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

    def note_late(self, row: GrammarState) -> None:
        """Count a row that a step has waited for in vain as slow."""
        with self._progress:
            row.is_slow |= not row.is_ready

    def wait_for_any(self, timeout_s: float) -> None:
        """Wait until some row becomes ready, or for the timeout."""
        with self._progress:
            self._progress.wait(timeout_s)

    def _fill_here(self, rows: list[GrammarState]) -> None:
        began = time.perf_counter()
        self._fill_many(rows, in_this_thread=True)
        ended = time.perf_counter()
        if ended - began > LONG_HERE_S:
            self._rests_until_s = ended + REST_FACTOR * (ended - began)

    def _fill_slowly(self, rows: list[GrammarState]) -> None:
        with long_slices():
            self._fill(rows)

    def _fill(self, rows: list[GrammarState]) -> None:
        if len(rows) >= MANY:
            self._fill_many(rows)
            return
        for row in rows:
            began = time.perf_counter()
            row.fill(self.most_forced)
            took_s = time.perf_counter() - began
            with self._progress:
                row.note_time(is_slow=took_s > SLOW_S)
                self._hand_back([row])

    def _fill_many(self, rows: list[GrammarState], *, in_this_thread: bool = False) -> None:
        began = time.perf_counter()
        bits = GrammarState.fill_together(
            rows, in_this_thread=in_this_thread, most_forced=self.most_forced
        )
        is_slow = time.perf_counter() - began > SLOW_S
        with self._progress:
            for row in rows:
                if is_slow:
                    row.note_slow_company()
                else:
                    row.note_time(is_slow=False)
            self._hand_back(rows, bits)

    def _hand_back(self, rows: list[GrammarState], bits: IntArray | None = None) -> None:
        """Post the masks of rows, and mark these as ready. `_progress` is held."""
        # In this order: the engine thread may launch a step as soon as its rows are ready, and some
        # devices take what is posted then.
        self._post(rows, bits)
        for row in rows:
            row.is_ready = True
        if self._watched:
            self._watched_ready += self._watched.intersection(rows)
            self._watched.difference_update(rows)
        self._awaited.difference_update(rows)
        if not self._awaited:
            self._progress.notify()

    def _post(self, rows: list[GrammarState], bits: IntArray | None = None) -> None:
        """Post the masks of the rows that have a slot. bits: [N, num_words] masks of all rows, if
        they lie side by side. `_progress` is held, so that no row loses its slot meanwhile."""
        if self.receiver is None:
            return
        good = [row for row in rows if row.slot >= 0 and row.error is None]
        if good:
            if bits is None or len(good) < len(rows):
                bits = np.stack([row.filled for row in good])
            slots = np.asarray([row.slot for row in good], np.int32)
            positions = np.asarray([row.position for row in good], np.int32)
            if any(row.forced for row in good):
                self.receiver.post_masks(slots, positions, bits, [row.forced for row in good])
            else:
                self.receiver.post_masks(slots, positions, bits)
        bad = [row.slot for row in rows if row.slot >= 0 and row.error is not None]
        if bad:
            self.receiver.withhold_masks(np.asarray(bad, np.int32))
