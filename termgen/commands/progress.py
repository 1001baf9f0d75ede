"""Progress of fetching and loading, on standard error: a bar on a terminal, plain lines elsewhere.

A terminal that cannot move its cursor (TERM=dumb) gets plain lines too.

An instance is the `on_progress(stage, fraction)` callback that the catalog and the engine take.
They may call it from any thread; calls come one at a time.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from termgen.vocabulary.startup_phases import READY


def is_dumb() -> bool:
    """Whether the terminal says that it takes nothing but lines."""
    return os.environ.get("TERM") == "dumb"


class TerminalProgress:
    """One bar per stage. Leave the `with` block before printing anything else."""

    def __init__(self, stream: TextIO | None = None, *, plain: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._draws = self._stream.isatty() and not plain and not is_dumb()
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._stage and stage != READY:  # what comes next says so
            self._start(stage)
        if self._bar is not None:
            self._bar.update(min(max(fraction, 0.0), 1.0) - self._bar.n)

    def of_server(self, phase: str, fraction: float) -> None:
        """The same for the start of a server elsewhere."""
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
