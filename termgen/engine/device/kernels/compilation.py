"""Compiles Triton kernels ahead of time, in parallel, and counts late compilations.

Used by the runner while it starts (`collect_missing`, `compile_all`) and around each step later
(`CompileCounter`). Triton reports compilations through global hooks; each is set for the length of
a `with` block and then restored, so that engines in one process do not affect each other.

Loading a kernel from Triton's cache on disk counts as a compilation too: it is faster, but requests
wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

MAX_THREADS = 16
"""More threads do not help, as a third of the work holds the GIL."""

Missing = dict[tuple[str, str], tuple[Any, str]]
"""(kernel, specialisation) -> what Triton needs to compile it without its arguments."""


@contextmanager
def collect_missing() -> Iterator[Missing]:
    """Launch nothing from this thread inside the block; collect the kernels it would compile.

    No kernel is launched, because one may run for ever on values that another did not write.
    Outputs keep their old values.
    """
    missing: Missing = {}
    thread = threading.get_ident()

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        if threading.get_ident() != thread:
            return False
        missing[f"{fn.module}.{fn.name}", key] = (fn.jit_function, compile["specialization_data"])
        return True  # makes Triton stop here

    run = JITFunction.run

    def prepare(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        is_ours = threading.get_ident() == thread
        return run(self, *args, grid=grid, warmup=warmup or is_ours, **options)

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    JITFunction.run = prepare
    try:
        yield missing
    finally:
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = before


def compile_all(
    missing: Missing, device: torch.device, on_progress: Callable[[float], None]
) -> None:
    """Compile the collected kernels in parallel: compilation runs mostly without the GIL."""
    if not missing:
        return

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton compiles for the thread's current device

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = min(MAX_THREADS, cpus, len(missing))
    with ThreadPoolExecutor(num_threads, "termgen-compile", initializer=begin) as pool:
        jobs = [pool.submit(kernel.preload, data) for kernel, data in missing.values()]
        try:
            for done, job in enumerate(as_completed(jobs)):
                job.result()
                on_progress((done + 1) / len(jobs))
        except BaseException:  # start-up was stopped: do not compile the rest first
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Counters:
    """Triton's only hook, shared by all entered counters: their threads end in any order, so a
    counter must not restore the hook that it found."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.entered: dict[CompileCounter, int] = {}
        """Counter -> the thread that entered it."""

    def __call__(self, *, repr: str, **event: Any) -> object:
        here = threading.get_ident()
        late = [counter for counter, thread in tuple(self.entered.items()) if thread == here]
        for counter in late:
            counter.count += 1
        if late:
            logger.warning("a kernel was compiled while requests ran, which held them up: %s", repr)
        return self.before(repr=repr, **event) if self.before is not None else None


class CompileCounter:
    """Counts compilations inside its `with` blocks; enter it around work that should need none.

    Counts only those of the entering thread, as another engine may be starting in this process.
    """

    def __init__(self) -> None:
        self.count = 0
        self._counters: _Counters | None = None

    def __enter__(self) -> CompileCounter:
        hook = knobs.runtime.jit_post_compile_hook
        if not isinstance(hook, _Counters):
            hook = knobs.runtime.jit_post_compile_hook = _Counters(hook)
        hook.entered[self] = threading.get_ident()
        self._counters = hook
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        counters, self._counters = self._counters, None
        assert counters is not None
        del counters.entered[self]
        if not counters.entered and knobs.runtime.jit_post_compile_hook is counters:
            knobs.runtime.jit_post_compile_hook = counters.before
