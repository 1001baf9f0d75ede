"""Memory of a process and its descendants, as Linux counts it.

Reads /proc from outside, without help from the watched process. Used by `memory_soak.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
ARENA_BYTES = 64 << 20
"""glibc keeps the memory of all threads but the first in regions of this size and alignment."""

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")


def descendants(pid: int) -> list[int]:
    """Processes that this one has started, and theirs."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                found += [int(child) for child in (task / "children").read_text().split()]
    return found + [grandchild for child in found for grandchild in descendants(child)]


def resident_kib(pid: int) -> dict[str, int]:
    """`rss`, `pss` (shared pages by their share) and `anonymous`; empty when it has ended."""
    wanted = {"Rss": "rss", "Pss": "pss", "Anonymous": "anonymous"}
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        fields = (line.split() for line in lines)
        return {wanted[f[0][:-1]]: int(f[1]) for f in fields if f[0][:-1] in wanted}
    return {}


def resident_by_kind(pid: int) -> dict[str, int]:
    """Resident KiB by kind of mapping, and the number of arenas.

    `heap` is C code's memory in the first thread, `arenas` that in the others; `blocks` are large
    pieces: tensors, Python's arenas, threads' stacks. `files` are programs and model files.
    """
    totals = dict.fromkeys(("heap", "arenas", "blocks", "files", "num_arenas"), 0)
    for kind, is_arena, kib in _mappings(pid):
        totals[kind] += kib
        totals["num_arenas"] += is_arena
    return totals


def _mappings(pid: int) -> Iterator[tuple[str, bool, int]]:
    kind, is_arena = "blocks", False
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if found := _MAPPING.match(line):
                begin, _, _, inode, path = found.groups()
                # A region of its own: the kernel joins neighbours only if their rights are equal,
                # and the unused part of an arena has none.
                is_arena = not int(inode) and not path and int(begin, 16) % ARENA_BYTES == 0
                kind = "arenas" if is_arena else "heap" if path == "[heap]" else "blocks"
                if int(inode):
                    kind = "files"
            elif line.startswith("Rss:"):
                yield kind, is_arena, int(line.split()[1])
