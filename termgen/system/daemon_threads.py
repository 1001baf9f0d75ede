"""A thread pool for long jobs, which is not joined when the process ends.

Used for work that clients can make slow: compiling grammars, filling masks. Python joins the
threads of a `ThreadPoolExecutor` at exit, however long that takes.

The threads keep the normal priority. With a lower one they could lose their core on a busy machine
while they hold the GIL, and every thread would wait with them. Instead, `spare_threads` leaves one
core free.
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
    """Runs jobs in order. Threads start when needed and end with this object."""

    def __init__(self, num_threads: int, name: str, *, stack_bytes: int = 0) -> None:
        """stack_bytes: stack size per thread; 0: the system's default."""
        self._num_threads = num_threads
        self._stack_bytes = stack_bytes
        self._name = name
        self._jobs: Jobs = SimpleQueue()
        self._num_started = 0
        self._end = weakref.finalize(self, _end, self._jobs, num_threads)

    def submit(self, job: Job) -> None:
        """Queue a job, which must not raise. One caller at a time. Raises RuntimeError if the
        system cannot start even one thread."""
        self._jobs.put(job)
        if self._num_started < self._num_threads:
            self._start_one()

    def close(self) -> None:
        """End the threads once the queued jobs are done."""
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
            return  # the threads already started must suffice
        self._num_started += 1


@contextlib.contextmanager
def _stack_size(num_bytes: int) -> Iterator[None]:
    """Stack size of threads started inside the block; the setting is per process."""
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
    """Threads that may compute for long at the same time: all cores but one, at least one."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux: the cores this process may use
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(most, num_cores - 1))


def _run(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it may reference the pool, whose finalizer would then never run


def _end(jobs: Jobs, num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)
