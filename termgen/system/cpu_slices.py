"""Scheduler time slices: how long a thread computes before others run, under the GIL and on a core.

The engine thread wakes up every few milliseconds, works briefly, and must not wait for a thread
that computes for long. Python's switch interval bounds that for the GIL. On a core, Linux 6.12 and
newer gives threads equal shares in slices of some milliseconds; a thread with shorter slices keeps
its share but runs sooner after waking up. Lowering the other threads' priority would not work: they
hold the GIL at times, and a thread that holds it must not wait for a core. Slices are inherited by
threads and child processes. Elsewhere only the switch interval has an effect.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 1e-4
"""Python's default of 5 ms lets a repaint delay an engine step by that much."""
SHORT_SLICE_NS = 500_000
"""Linux permits 0.1 ms; but then a thread that draws for some milliseconds is interrupted by 1 ms
steps so often that both are slower."""
_USUAL_NS = 0  # the system's own length
_WITH_SLICES = (0, 3)
"""Scheduling classes with slices: SCHED_OTHER and SCHED_BATCH."""
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
"""Numbers of the system calls sched_setattr and sched_getattr."""


class _Attributes(ctypes.Structure):
    """`struct sched_attr`, first version, which every kernel accepts; see sched_setattr(2)."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def share_lock_quickly() -> None:
    """Shorten the GIL's switch interval, in a process with an engine."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def take_short_slices() -> None:
    """Shorten the slices of this thread and of those it starts later, for a thread that wakes up
    often and works briefly. Not for CPU inference: compute threads would interrupt each other."""
    _set_slice(SHORT_SLICE_NS)


@contextmanager
def quick_lock() -> Iterator[None]:
    """`share_lock_quickly` with the former setting restored, for use as a library."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def take_long_slices() -> None:
    """Restore the default slices, in a process that computes for long."""
    _set_slice(_USUAL_NS)


@contextmanager
def long_slices() -> Iterator[None]:
    """Default slices while this thread computes without the GIL, so that short-slice threads run
    first."""
    before = slice_ns()
    take_long_slices()
    try:
        yield
    finally:
        if before:
            _set_slice(before)


def slice_ns() -> int | None:
    """This thread's slice; None if the system cannot tell, 0 if it has no slices."""
    attributes = _read()
    return None if attributes is None else int(attributes.runtime_ns)


def _set_slice(nanoseconds: int) -> None:
    attributes = _read()
    if attributes is None or attributes.policy not in _WITH_SLICES:
        return  # a scheduling class without slices
    attributes.runtime_ns = nanoseconds
    _call(0, ctypes.byref(attributes), 0)  # a sandbox may forbid it, to no effect


def _read() -> _Attributes | None:
    attributes = _Attributes()
    size = ctypes.sizeof(attributes)
    return attributes if _call(1, ctypes.byref(attributes), size, 0) else None


def _call(which: int, *arguments: object) -> bool:
    """Call sched_setattr (0) or sched_getattr (1) for this thread; True on success."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not sys.platform.startswith("linux"):
        return False
    number = ctypes.c_long(calls[which])
    return int(_c_library().syscall(number, ctypes.c_long(0), *arguments)) == 0


@functools.cache
def _c_library() -> ctypes.CDLL:
    """The C library, cached: each `CDLL` creates classes in reference cycles, which is garbage."""
    return ctypes.CDLL(None)
