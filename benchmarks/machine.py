"""The machine of a benchmark, the memory of its processes and the time of its event loops; its
arguments and its report. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

ARENA_BYTES = 64 << 20
"""glibc keeps the memory of all threads but the first in regions of this size and alignment."""

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")
PACKAGES = ("termgen", "torch", "transformers", "numpy", "xllamacpp", "accelerate")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser described by a module's first line, with the flag that `write_report` reads."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--output-json", type=Path, help="write machine, settings and results here")
    return parser


def write_report(
    args: argparse.Namespace, results: Any, facts: dict[str, Any] | None = None
) -> None:
    """Write settings and results to the file that `--output-json` names, if given.

    facts: those of before the run, if the load of the machine then counts.
    """
    if args.output_json is not None:
        settings = {k: v for k, v in vars(args).items() if k != "output_json"}
        report = {"machine": facts or machine_facts(), "settings": settings, "results": results}
        args.output_json.write_text(json.dumps(report, indent=1, default=str) + "\n")


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: v for name in PACKAGES if (v := package_version(name)) is not None},
        "load_average": os.getloadavg(),
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory_gib() -> float:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return round(pages / 2**30, 1)


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Their number, p50, p99 and maximum; NaN without any."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0} | dict.fromkeys(("p50", "p99", "max"), float("nan"))
    last = len(ordered) - 1
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    at = {name: ordered[min(last, int(len(ordered) * share))] for name, share in shares.items()}
    return {"count": len(ordered), **at}


def print_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """A table; the names in the first row are its heads."""
    texts = [{name: _text(value) for name, value in row.items()} for row in rows]
    if not texts:
        return
    heads = list(texts[0])
    widths = [max(len(head), *(len(row.get(head, "")) for row in texts)) for head in heads]
    for row in ({head: head for head in heads}, *texts):
        cells = zip(heads, widths, strict=True)
        print("  ".join(f"{row.get(head, ''):>{width}}" for head, width in cells), flush=True)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# -- an event loop ------------------------------------------------------------------------------


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

    longest_ns = 0

    def reset(self) -> None:
        self.longest_ns = 0

    def watching(self) -> AbstractContextManager[None]:
        return timed_callbacks(self._see)

    def _see(self, handle: Any, spent_ns: int) -> None:
        self.longest_ns = max(self.longest_ns, spent_ns)


# -- memory, as Linux counts it, without help from the watched process ----------------------------


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


def resident_mib() -> float:
    """Resident memory of this process."""
    return resident_kib(os.getpid())["rss"] / 1024


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
