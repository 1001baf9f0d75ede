"""A few threads for work that may take long, and that nobody waits for when the process ends.

Used for what clients can make slow: compiling grammars, filling masks. The threads of a
`ThreadPoolExecutor` are joined when Python exits, however long that takes; these are not. They may
have a lower priority, where the system gives each thread its own: for native code that computes for
long without Python's lock. With the lock they must only be for moments, as others then wait for
them however little they are given.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]
Jobs = SimpleQueue[Job | None]


class DaemonThreads:
    """Runs jobs in order. The threads start when they are needed and end with this object."""

    def __init__(self, num_threads: int, name: str, *, niceness: int = 0) -> None:
        self._num_threads = num_threads
        self._niceness = niceness
        self._name = name
        self._jobs: Jobs = SimpleQueue()
        self._num_started = 0
        weakref.finalize(self, _end, self._jobs, num_threads)

    def submit(self, job: Job) -> None:
        """Run this when a thread is free; it must not raise. One caller at a time."""
        self._jobs.put(job)
        if self._num_started < self._num_threads:
            self._num_started += 1
            name = f"{self._name}-{self._num_started}"
            args = (self._jobs, self._niceness)
            threading.Thread(target=_run, args=args, name=name, daemon=True).start()


def _run(jobs: Jobs, niceness: int) -> None:
    if niceness and sys.platform == "linux":
        with contextlib.suppress(OSError):
            # of this thread alone, and of processes that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    while (job := jobs.get()) is not None:
        job()
        del job  # it may hold the owner of these threads, which would never end


def _end(jobs: Jobs, num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)
