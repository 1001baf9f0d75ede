"""The bench screen: a run while it goes on, then its report. It asks for a `BenchView` a few times
a second and paints what differs; what is measured never waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.events import MouseScrollDown, MouseScrollUp, ScreenResume, ScreenSuspend
from textual.widgets import Footer

from termgen.tui.bench.bench_rows import HEAD_ROWS, bench_page, report_page, report_rows
from termgen.tui.bench.bench_view import BenchView
from termgen.tui.dashboard import dashboard_keys
from termgen.tui.dashboard.dashboard import BOX_COLUMNS, BOX_ROWS, DashboardScreen
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.canvas_screen import ThemedScreen
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.spans import Row

PAGE_ROWS = 10
END = 1_000_000

KEYS = [
    Binding(
        "r",
        "report",
        "Report",
        id="bench.report",
        tooltip="Turn between the figures and the report, once there is one",
    ),
    Binding(
        "up",
        "scroll(-1)",
        "Scroll",
        id="bench.up",
        key_display="↑↓",
        tooltip="Scroll the report up",
    ),
    Binding(
        "down", "scroll(1)", "Down", show=False, id="bench.down", tooltip="Scroll the report down"
    ),
    Binding(
        "pageup",
        f"scroll(-{PAGE_ROWS})",
        "Page up",
        show=False,
        id="bench.page_up",
        tooltip="Scroll the report ten rows up",
    ),
    Binding(
        "pagedown,space",
        f"scroll({PAGE_ROWS})",
        "Page down",
        show=False,
        id="bench.page_down",
        tooltip="Scroll the report ten rows down",
    ),
    Binding(
        "home",
        f"scroll(-{END})",
        "Begin",
        show=False,
        id="bench.first",
        tooltip="Go to the beginning of the report",
    ),
    Binding("end", f"scroll({END})", "End", show=False, id="bench.last", tooltip="Go to its end"),
    Binding(
        "s",
        "stop",
        "Stop",
        id="bench.stop",
        tooltip="End the run now and keep what is measured (as ctrl+c does)",
    ),
    Binding(
        "f2,2",
        "app.show('dashboard')",
        "Engine",
        id="bench.engine",
        tooltip="Watch the engine of the server, if it is termgen's",
    ),
    Binding(
        "q",
        "app.quit",
        "Leave",
        id="bench.leave",
        tooltip="Leave; a run under way is stopped, and what is measured is kept",
    ),
]


BACK = [
    Binding(
        "f2,1",
        "app.show('bench')",
        "Bench",
        id="dashboard.bench",
        tooltip="Go from the engine back to the bench",
    )
]


class BenchEngineScreen(DashboardScreen):
    """The dashboard, from which one comes back to the bench: there is no chat."""

    BINDINGS = [*BACK]

    async def action_leave(self) -> None:
        """Quit, as the bench screen does."""
        await self.app.action_quit()


def bench_engine_keys() -> list[Binding]:
    return [*(key for key in dashboard_keys.KEYS if key.id != "dashboard.chat"), *BACK]


class BenchScreen(ThemedScreen):
    BINDINGS = [*KEYS]

    def __init__(
        self, read: Callable[[], BenchView], *, stop: Callable[[], None], hz: float
    ) -> None:
        super().__init__()
        self._read = read
        self._stop = stop
        self._hz = hz
        self._has_report = False
        self._shows_report = False
        self._first_row = 0

    @property
    def is_measuring(self) -> bool:
        return not self._read().is_over

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint, id="bench")
        yield Footer(show_command_palette=False)

    @on(ScreenResume)
    def _start_pump(self) -> None:
        self._pump()

    @on(ScreenSuspend)
    def _stop_pump(self) -> None:
        self.workers.cancel_group(self, "pump")

    @work(group="pump", exclusive=True)
    async def _pump(self) -> None:
        while not self.look():
            await asyncio.sleep(1 / self._hz)

    def look(self) -> bool:
        """One frame. True when there is the report and nothing will change any more."""
        view = self._read()
        if view.is_over and not self._has_report:
            self._has_report = self._shows_report = True
        self._canvas.repaint()
        return view.is_over

    @property
    def _canvas(self) -> Canvas:
        return self.query_one("#bench", Canvas)

    def action_report(self) -> None:
        if self._has_report:
            self._shows_report = not self._shows_report
            self._canvas.repaint()

    def action_scroll(self, by: int) -> None:
        if not self._shows_report:
            return
        frame = self._report_frame(*self._canvas.size)
        rows = report_rows(self._read().report, frame.inner_width)
        last = max(0, len(rows) - frame.inner_height)
        self._first_row = min(last, max(0, self._first_row + by))
        self._canvas.repaint()

    def action_stop(self) -> None:
        if self.is_measuring:
            self._stop()

    @on(MouseScrollDown)
    def _scroll_down(self) -> None:
        self.action_scroll(3)

    @on(MouseScrollUp)
    def _scroll_up(self) -> None:
        self.action_scroll(-3)

    @property
    def _boxed(self) -> bool:
        return self.size.width >= BOX_COLUMNS and self.size.height >= BOX_ROWS

    def _report_frame(self, width: int, height: int) -> Frame:
        return Frame(width, max(0, height - HEAD_ROWS), self._boxed)

    def _paint(self, width: int, height: int) -> Sequence[Row]:
        view, boxed = self._read(), self._boxed
        if self._shows_report:
            frame = self._report_frame(width, height)
            rows = report_rows(view.report, frame.inner_width)
            first = min(self._first_row, max(0, len(rows) - frame.inner_height))
            return report_page(view, rows, first, frame)
        return bench_page(view, width, height, boxed=boxed)
