"""The pages of the dashboard but the overview: what they are drawn from, and their zoom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from termgen.client import ModelInfo
from termgen.tui.dashboard.pages import graphs, timeline
from termgen.tui.dashboard.pages.inspector import inspector_page
from termgen.tui.dashboard.pages.kv_page import kv_page
from termgen.tui.dashboard.pages.lanes import batch_page
from termgen.tui.dashboard.pages.log_page import log_page
from termgen.tui.dashboard.state.kv_cursor import KvCursor
from termgen.tui.dashboard.state.log import Level, LogBook, LogScroll
from termgen.tui.dashboard.state.request_history import RequestHistory
from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.palette import Glyphs
from termgen.tui.paint.spans import Row
from termgen.vocabulary.device.gpu_reading import GpuHistory


@dataclass(frozen=True, slots=True)
class Sight:
    """The data that pages are drawn from."""

    view: DashboardView
    """The figures at the marked step."""
    present: DashboardView
    """The newest figures, for pages that show a request's whole life, or the log."""
    gpu: GpuHistory
    lanes: RequestHistory
    model: ModelInfo
    glyphs: Glyphs
    boxed: bool
    back: int | None
    """Steps from the newest to the marked one."""
    selected: str | None
    """The marked request."""
    log: LogBook
    trouble: str
    """The present fault; empty without one."""
    observer_share: float | None
    """Share of a core that the drawing thread uses."""


class Pages:
    """Draws a page by name, and keeps its zoom and cursor."""

    def __init__(self) -> None:
        self.kv_cursor = KvCursor()
        self.log_level = Level.INFO
        self.search = ""
        self.log_scroll = LogScroll()
        self._num_steps = timeline.DEFAULT_STEPS
        self._phase_times = timeline.PhaseTimes()
        self._painters = {
            "timeline": self._timeline,
            "batch": self._batch,
            "blocks": self._blocks,
            "request": self._request,
            "graphs": self._graphs,
            "log": self._log,
        }

    def paint(self, name: str, sight: Sight, width: int, height: int) -> Sequence[Row]:
        return self._painters[name](sight, width, height)

    def zoom(self, name: str, by: int) -> None:
        """Closer for 1, farther for -1, where the page has a zoom."""
        if name == "blocks":
            self.kv_cursor.zoom(by)
        else:
            wanted = self._num_steps // 2 if by > 0 else self._num_steps * 2
            self._num_steps = min(timeline.MAX_STEPS, max(timeline.MIN_STEPS, wanted))

    def move(self, name: str, *, rows: int = 0, columns: int = 0) -> bool:
        """Move the cursor in the map of blocks, or scroll the log. True if the page has one of
        these."""
        if name == "blocks":
            self.kv_cursor.move(rows=rows, columns=columns)
        elif name == "log":
            self.log_scroll.move(rows + columns)
        return name in ("blocks", "log")

    def _timeline(self, sight: Sight, width: int, height: int) -> Sequence[Row]:
        return timeline.timeline_page(
            sight.view.steps,
            width,
            height,
            sight.glyphs,
            boxed=sight.boxed,
            cursor=sight.back,
            num_steps=self._num_steps,
            phase_times=self._phase_times,
            has_run=sight.view.has_run,
            on_cpu=sight.view.on_cpu,
        )

    def _batch(self, sight: Sight, width: int, height: int) -> Sequence[Row]:
        return batch_page(
            sight.view,
            sight.lanes,
            width,
            height,
            sight.glyphs,
            boxed=sight.boxed,
            cursor=sight.back,
            selected=sight.selected,
        )

    def _blocks(self, sight: Sight, width: int, height: int) -> Sequence[Row]:
        return kv_page(
            sight.view,
            self.kv_cursor,
            width,
            height,
            sight.glyphs,
            boxed=sight.boxed,
            selected=sight.selected,
            groups=sight.model.cache_groups,
        )

    def _request(self, sight: Sight, width: int, height: int) -> Sequence[Row]:
        """The inspector of the marked request, or of the first in the table."""
        first = next((row.request_id for row in sight.view.requests), None)
        return inspector_page(
            sight.lanes.get(sight.selected or first),
            sight.present.steps,
            sight.present.now_ns,
            width,
            height,
            sight.glyphs,
            boxed=sight.boxed,
        )

    def _graphs(self, sight: Sight, width: int, height: int) -> Sequence[Row]:
        return graphs.graphs_page(
            sight.view,
            sight.model,
            width,
            height,
            sight.glyphs,
            boxed=sight.boxed,
            phase_times=self._phase_times,
            gpu=sight.gpu,
        )

    def _log(self, sight: Sight, width: int, height: int) -> Sequence[Row]:
        return log_page(
            sight.present,
            sight.log,
            width,
            height,
            boxed=sight.boxed,
            trouble=sight.trouble,
            observer_share=sight.observer_share,
            level=self.log_level,
            words=self.search,
            scroll=self.log_scroll,
        )
