"""Callbacks of an event loop, timed by the processor time of its thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def timed_callbacks(on_callback: Callable[[Any, int], object]) -> Iterator[None]:
    """Report every handle that any loop of this process runs, with its nanoseconds."""
    handle: Any = asyncio.Handle
    run, clock = handle._run, time.thread_time_ns

    def timed(this: Any) -> None:
        before = clock()
        run(this)
        on_callback(this, clock() - before)

    handle._run = timed
    try:
        yield
    finally:
        handle._run = run


class LoopWatch:
    """The longest callback since the last `reset`."""

    def __init__(self) -> None:
        self.longest_ns, self.longest = 0, ""

    def reset(self) -> None:
        self.longest_ns, self.longest = 0, ""

    def watching(self) -> Any:
        return timed_callbacks(self._see)

    def _see(self, handle: Any, spent_ns: int) -> None:
        if spent_ns > self.longest_ns:
            self.longest_ns, self.longest = spent_ns, _name(handle)


def _name(handle: Any) -> str:
    """The function in which a task is suspended; for any other handle, its callback."""
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        frames = owner.get_stack()
        if frames:
            return f"{frames[-1].f_code.co_name}:{frames[-1].f_lineno}"
        return str(owner.get_coro())
    return str(getattr(callback, "__qualname__", callback))
