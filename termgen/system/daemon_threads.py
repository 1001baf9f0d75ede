"""A few threads for work that may take long, and that nobody waits for when the process ends.

Used for what clients can make slow: compiling grammars, filling masks. The threads of a
`ThreadPoolExecutor` are joined when Python exits, however long that takes; these are not.

They have the priority of everybody else. With a lower one they would be given no processor on a
busy machine, in moments in which they hold Python's lock or are to be handed it, and with them
everybody would wait. Instead, `spare_threads` leaves a core to the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue

Job = Callable[[], object]
Jobs = SimpleQueue[Job | None]

_starting = threading.Lock()


class DaemonThreads:
    """Runs jobs in order. The threads start when they are needed and end with this object."""

    def __init__(self, num_threads: int, name: str, *, stack_bytes: int = 0) -> None:
        """stack_bytes: of each thread; 0 for what the system gives."""
        self._num_threads = num_threads
        self._stack_bytes = stack_bytes
        self._name = name
        self._jobs: Jobs = SimpleQueue()
        self._num_started = 0
        self._end = weakref.finalize(self, _end, self._jobs, num_threads)

    def submit(self, job: Job) -> None:
        """Run this when a thread is free; it must not raise. One caller at a time. Raises
        RuntimeError where the system has not a single thread for it."""
        self._jobs.put(job)
        if self._num_started < self._num_threads:
            self._start_one()

    def close(self) -> None:
        """The threads end once they have done what is there."""
        self._end()

    def _start_one(self) -> None:
        name = f"{self._name}-{self._num_started + 1}"
        thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        try:
            with _stack_size(self._stack_bytes):
                thread.start()
        except RuntimeError:
            if not self._num_started:
                self._jobs.get_nowait()
                raise
            return  # those that there are have to do
        self._num_started += 1


@contextlib.contextmanager
def _stack_size(num_bytes: int) -> Iterator[None]:
    """The stack of threads that start meanwhile: a setting of the whole process."""
    if not num_bytes:
        yield
        return
    with _starting:
        before = threading.stack_size(num_bytes)
        try:
            yield
        finally:
            threading.stack_size(before)


def spare_threads(most: int) -> int:
    """How many threads may compute for long at one time: all cores but one, at least one."""
    has_affinity = hasattr(os, "sched_getaffinity")  # what this process may use, on Linux
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(most, num_cores - 1))


def _run(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it may hold the owner of these threads, which would never end


def _end(jobs: Jobs, num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)
