"""`termgen trace`: a recording of `termgen top --record` as a file for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from termgen import __version__
from termgen.commands.exit_codes import OK
from termgen.errors import ConfigError
from termgen.trace.chrome_trace import TracePart, TraceTotals, write_trace
from termgen.tui.feeds.replay import read_frames
from termgen.vocabulary.events import EngineEvent
from termgen.vocabulary.telemetry import Events, Frame, Opening, decode

SUFFIX = ".trace.json.gz"


def run_trace(recording: Path, output: Path | None) -> int:
    """Convert a recording. An existing file is never overwritten; one that cannot be finished is
    removed."""
    try:
        frames = [frame for _, frame in read_frames(recording)]
    except OSError as error:
        raise ConfigError(f"{recording}: {error.strerror}", param="recording") from error
    parts = parts_of(frames)
    output = output or recording.with_name(recording.stem + SUFFIX)
    try:
        with output.open("xb") as out:
            totals = _write(out, output, parts)
    except FileExistsError:
        raise ConfigError(f"--output {output} exists already", param="output") from None
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}", param="output") from error
    steps, seconds = f"{totals.num_steps:,} steps", totals.length_ns / 1e9
    print(f"{output}: {steps} in {seconds:.1f} s; open it at https://ui.perfetto.dev")
    return OK


def _write(out: BinaryIO, output: Path, parts: list[TracePart]) -> TraceTotals:
    try:
        return write_trace(out, parts, about={"termgen": __version__})
    except BaseException:
        os.unlink(output)
        raise


def parts_of(frames: list[Frame]) -> list[TracePart]:
    """One part for each engine of a recording: a server that was started again begins another.
    Times are those of the calendar, as each process has a clock of its own."""
    begins: list[tuple[int, Opening]] = []
    for place, frame in enumerate(frames):
        message = decode(frame) if frame.event == "snapshot" else None
        if isinstance(message, Opening):
            is_same = bool(begins) and begins[-1][1].stream == message.stream
            if not is_same:  # otherwise the watcher was away for a moment
                begins.append((place, message))
    ends = [place for place, _ in begins[1:]] + [len(frames)]
    return [
        TracePart(
            name=f"termgen {opening.model.model_id}",
            events=partial(_events, frames[place:end]),
            on_cpu=opening.model.device == "cpu",
            offset_ns=opening.unix_ns - opening.clock_ns,
        )
        for (place, opening), end in zip(begins, ends, strict=True)
    ]


def _events(frames: list[Frame]) -> Iterator[EngineEvent]:
    for frame in frames:
        message = decode(frame)
        if isinstance(message, Events):
            yield from message.events
