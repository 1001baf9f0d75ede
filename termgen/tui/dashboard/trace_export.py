"""The events that a dashboard has kept, as a trace in the current folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import BinaryIO

from termgen.client import ModelInfo
from termgen.trace.chrome_trace import TracePart, TraceTotals, earliest, write_trace
from termgen.vocabulary.events import EngineEvent, RequestEvent


def events_between(events: Iterable[EngineEvent], begin_ns: int, end_ns: int) -> list[EngineEvent]:
    """Those that began after `begin_ns` and had ended by `end_ns`."""
    return [e for e in events if earliest(e) >= begin_ns and _latest(e) <= end_ns]


def _latest(event: EngineEvent) -> int:
    return event.time_ns if isinstance(event, RequestEvent) else event.applied_ns


def export_trace(
    folder: Path, events: Sequence[EngineEvent], model: ModelInfo
) -> tuple[Path, TraceTotals]:
    """Write a new file, named by the time. Raises OSError, and leaves no part of a file then."""
    part = TracePart(f"termgen {model.model_id}", lambda: events, on_cpu=model.device == "cpu")
    path, out = _new_file(folder)
    try:
        with out:
            return path, write_trace(out, [part])
    except BaseException:
        os.unlink(path)
        raise


def _new_file(folder: Path) -> tuple[Path, BinaryIO]:
    """An existing file is never overwritten."""
    stem = time.strftime("termgen-%Y%m%d-%H%M%S")
    for number in count(1):
        path = folder / f"{stem}{f'-{number}' if number > 1 else ''}.trace.json.gz"
        try:
            return path, path.open("xb")
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")
