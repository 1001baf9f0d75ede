"""How long a thread computes before others run: under the GIL, and on its core.

An engine wakes up every few milliseconds, does a little, and must not wait for a thread that
computes for long. For the GIL that is a setting. On a core, Linux (6.12 and newer) gives every
thread the same share in slices of some milliseconds, and a thread may ask for shorter ones: its
share stays, but it runs sooner after it wakes up. A lower priority for the others would not do:
they hold the GIL at times, and a thread that holds it must not wait for a core. Threads and
processes inherit their slices. On other systems, and older ones, only the GIL's setting has an
effect.
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
"""Linux grants 0.1 ms; but a thread that draws for some milliseconds beside steps of one is then
interrupted so often that both wait longer."""
_USUAL_NS = 0  # the system's own length
_WITH_SLICES = (0, 3)
"""SCHED_OTHER and SCHED_BATCH."""
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
"""Numbers of the system calls sched_setattr and sched_getattr."""


class _Attributes(ctypes.Structure):
    """`struct sched_attr` in its first form, which every kernel takes; see sched_setattr(2)."""

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
    """Shorten the GIL's switch interval, for a program that has an engine."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def take_short_slices() -> None:
    """Shorten the slices of this thread and of those it starts from now on: it wakes up often and
    does little. Not where the CPU computes the model: its threads would interrupt each other."""
    _set_slice(SHORT_SLICE_NS)


@contextmanager
def quick_lock() -> Iterator[None]:
    """`share_lock_quickly` for a while: a library must leave the program's own setting."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def take_long_slices() -> None:
    """Take the usual slices again, in a process that computes for long."""
    _set_slice(_USUAL_NS)


@contextmanager
def long_slices() -> Iterator[None]:
    """Usual slices while this thread computes without the GIL: short slices then run first."""
    before = slice_ns()
    take_long_slices()
    try:
        yield
    finally:
        if before:
            _set_slice(before)


def slice_ns() -> int | None:
    """This thread's slice; None where the system does not say, 0 where it knows none."""
    attributes = _read()
    return None if attributes is None else int(attributes.runtime_ns)


def _set_slice(nanoseconds: int) -> None:
    attributes = _read()
    if attributes is None or attributes.policy not in _WITH_SLICES:
        return  # another scheduling class, which has no slices
    attributes.runtime_ns = nanoseconds
    _call(0, ctypes.byref(attributes), 0)  # where a sandbox forbids it, all stays as it is


def _read() -> _Attributes | None:
    attributes = _Attributes()
    size = ctypes.sizeof(attributes)
    return attributes if _call(1, ctypes.byref(attributes), size, 0) else None


def _call(which: int, *arguments: object) -> bool:
    """Call sched_setattr (0) or sched_getattr (1) for this thread; whether that worked."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not sys.platform.startswith("linux"):
        return False
    number = ctypes.c_long(calls[which])
    return int(_c_library().syscall(number, ctypes.c_long(0), *arguments)) == 0


@functools.cache
def _c_library() -> ctypes.CDLL:
    """Made once: each `CDLL` makes classes that refer to each other, which is garbage."""
    return ctypes.CDLL(None)
