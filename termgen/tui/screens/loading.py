"""The loading screen. The engine reports from any thread; the screen looks ten times a second.

It stays below the screens that take its place, and does nothing there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from textual import on
from textual.app import ComposeResult
from textual.events import ScreenResume, ScreenSuspend
from textual.timer import Timer

from termgen.tui.key_hints import key_of
from termgen.tui.render.loading import loading_rows
from termgen.tui.screens.base import ThemedScreen
from termgen.tui.spans import Row
from termgen.tui.widgets.canvas import Canvas

POLL_S = 0.1


class StartupProgress:
    """Phases of the start. `report` may be called by any thread, the rest by the screen."""

    def __init__(self) -> None:
        self._reports: deque[tuple[str, float]] = deque()
        self._phases: dict[str, float] = {}

    def report(self, phase: str, share: float) -> None:
        self._reports.append((phase, share))

    def phases(self) -> list[tuple[str, float]]:
        """Every phase so far in the order they began, with the share done."""
        while self._reports:
            phase, share = self._reports.popleft()
            self._phases[phase] = min(1.0, max(0.0, share))
        return list(self._phases.items())


class LoadingScreen(ThemedScreen):
    def __init__(
        self, progress: StartupProgress, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__()
        self._progress = progress
        self._clock = clock
        self._started_s = clock()
        self._poll: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint, id="loading")

    def on_mount(self) -> None:
        self._poll = self.set_interval(POLL_S, self.query_one(Canvas).repaint)

    @on(ScreenSuspend)
    def _stop_looking(self) -> None:
        if self._poll is not None:
            self._poll.pause()

    @on(ScreenResume)
    def _look_again(self) -> None:
        if self._poll is not None:
            self._poll.resume()

    def _paint(self, width: int, height: int) -> Sequence[Row]:
        elapsed, quit_key = self._clock() - self._started_s, key_of(self, "app.quit")
        return loading_rows(self._progress.phases(), elapsed, width, height, quit_key=quit_key)
