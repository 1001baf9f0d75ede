"""Progress of fetching and loading, on standard error: a bar on a terminal, otherwise plain lines.

A terminal that cannot move its cursor (TERM=dumb) gets plain lines too.

An instance is the `on_progress(stage, fraction)` callback of the catalog and the engine. Calls may
come from any thread, one at a time.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from termgen.vocabulary.startup_phases import READY


def is_dumb() -> bool:
    """True if TERM says that the terminal cannot move its cursor."""
    return os.environ.get("TERM") == "dumb"


class TerminalProgress:
    """Shows one bar per stage. Leave the `with` block before printing anything else."""

    def __init__(self, stream: TextIO | None = None, *, plain: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._draws = self._stream.isatty() and not plain and not is_dumb()
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._stage and stage != READY:  # the next line printed implies it
            self._start(stage)
        if self._bar is not None:
            self._bar.update(min(max(fraction, 0.0), 1.0) - self._bar.n)

    def of_server(self, phase: str, fraction: float) -> None:
        """Show the loading phase of a remote server."""
        self(f"the server: {phase}", fraction)

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        self._stage = ""

    def _start(self, stage: str) -> None:
        self._close()
        self._stage = stage
        if self._draws:
            self._bar = tqdm(
                total=1.0,
                desc=stage,
                file=self._stream,
                leave=False,
                mininterval=0,
                miniters=0,
                bar_format="{desc} {percentage:3.0f}% |{bar:30}| {elapsed}",
            )
        else:
            print(f"termgen: {stage}", file=self._stream, flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
