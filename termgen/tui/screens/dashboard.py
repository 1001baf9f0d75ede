"""The engine screen: drains the event ring and asks for a snapshot a few times a second, and
paints. It computes nothing (`store` does) and styles nothing (`render` and the theme do).

While it is hidden nothing runs: the ring overwrites its oldest events, and what is still there
when the screen comes back fills its history.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import (
    Click,
    MouseMove,
    MouseScrollDown,
    MouseScrollUp,
    ScreenResume,
    ScreenSuspend,
)
from textual.widgets import Footer, Input

from termgen.engine.events import EngineEvent
from termgen.errors import EngineError
from termgen.tui.feed import EngineFeed, StreamFeed
from termgen.tui.formatting import clock
from termgen.tui.gpu_meter import GpuWatch
from termgen.tui.log import Level, LogTap
from termgen.tui.render import overview
from termgen.tui.render.batch import batch_panel
from termgen.tui.render.frame import Frame
from termgen.tui.render.kv_map import kv_panel
from termgen.tui.render.overview import LiveState
from termgen.tui.render.requests import requests_panel, row_at
from termgen.tui.replay import ReplayFeed
from termgen.tui.screens.base import ThemedScreen
from termgen.tui.screens.dashboard_keys import KEYS, PAGES, Page, page_at, tab_line
from termgen.tui.screens.dashboard_pages import Pages, Sight
from termgen.tui.spans import Row
from termgen.tui.store import DashboardStore, DashboardView
from termgen.tui.widgets.canvas import Canvas

BOX_COLUMNS, BOX_ROWS = 100, 34
IDLE_SNAPSHOT_S = 2.0
WINDOWS_S = (None, 30, 60, 120)
SNAPSHOT_S = 1.0
"""An engine that does not answer must not hold up the picture that says so."""
OBSERVER_SMOOTHING = 0.2
RING_CAPACITY = 4096
REPLAY_CAPACITY = 65_536
"""Turning a recording back plays minutes of it at once."""


class DashboardScreen(ThemedScreen):
    AUTO_FOCUS = ""  # the search is shown when asked for; until then keys are the screen's
    BINDINGS = [*KEYS]

    pages: tuple[Page, ...] = PAGES
    """With the keys of the moment."""

    def __init__(
        self,
        client: EngineFeed,
        *,
        hz: float,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        super().__init__()
        self._client = client
        self._hz = hz
        self._now_ns = now_ns
        self._cpu_ns = cpu_ns
        self._stream = client if isinstance(client, StreamFeed) else None
        self._replay = client if isinstance(client, ReplayFeed) else None
        self._epoch = self._stream.epoch if self._stream else 0
        self._ring = client.events(REPLAY_CAPACITY if self._replay else RING_CAPACITY)
        self._store = DashboardStore(started_ns=now_ns())
        self._view: DashboardView = self._store.view(now_ns())
        self._snapshot_ns = 0
        self._snapshot_idle = False
        self._observed: tuple[int, int] | None = None
        self._observer_share: float | None = None
        self._paused = False
        self._back: int | None = None
        self._selected: str | None = None
        self._first_row = 0
        self._page = "overview"
        self._window_s: int | None = None
        self._pages = Pages()
        self._gpu = GpuWatch(client)
        self._tap = LogTap() if self._stream is None else None
        """What an engine elsewhere logs is not in this process."""

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint_header, id="header")
        yield Canvas(lambda width, height: [tab_line(self._page, self.pages)], id="tabs")
        with Vertical(id="overview"):
            yield Canvas(self._paint_numbers, id="numbers")
            yield Canvas(self._paint_sparks, id="sparks")
            with Horizontal(id="tiles"):
                yield Canvas(self._framed(overview.decode_tile), id="decode")
                yield Canvas(self._framed(overview.prefill_tile), id="prefill")
                yield Canvas(self._framed(overview.step_tile), id="step")
                yield Canvas(self._paint_gauges, id="gauges")
            yield Canvas(self._paint_batch, id="batch")
            yield Canvas(self._paint_blocks, id="blocks")
            yield Canvas(self._paint_requests, id="requests")
        yield Canvas(self._paint_page, id="page")
        yield Input(placeholder="words in the log", id="search", compact=True)
        yield Footer(show_command_palette=False)

    @property
    def view(self) -> DashboardView:
        """What is on the screen."""
        return self._view

    def close(self) -> None:
        """Stop listening to the engine."""
        self._client.close_events(self._ring)
        if self._tap is not None:
            self._tap.close()

    @on(ScreenResume)
    def _start_pump(self) -> None:
        self._observed = None
        self._pump()
        self._watch_gpu()

    @on(ScreenSuspend)
    def _stop_pump(self) -> None:
        self.workers.cancel_group(self, "pump")
        self.workers.cancel_group(self, "gpu")

    @work(group="gpu", exclusive=True)
    async def _watch_gpu(self) -> None:
        await self._gpu.follow()

    @work(group="pump", exclusive=True)
    async def _pump(self) -> None:
        """The one timer of the screen. A step that takes long delays a frame, never a key."""
        while True:
            await self.refresh_view()
            await asyncio.sleep(1 / self._hz)

    async def refresh_view(self) -> None:
        """One frame: events, snapshot, view, paint."""
        events = self._take_events()
        waited_s = (self._now_ns() - self._snapshot_ns) / 1e9
        if events or not self._snapshot_idle or waited_s > IDLE_SNAPSHOT_S:
            await self._fetch_snapshot()
        self._observe()
        if not self._paused:
            self._view = self._store.view(self._now_ns(), window_s=self._window_s)
        self.paint()

    def _take_events(self) -> list[EngineEvent]:
        if self._replay is not None:
            self._replay.advance()
        events = self._ring.drain()
        lost = self._ring.num_dropped
        if self._stream is not None:
            lost += self._stream.num_dropped
            if self._stream.epoch != self._epoch:  # another engine, or another past
                self._epoch = self._stream.epoch
                self._store = DashboardStore(started_ns=self._now_ns())
                self._snapshot_idle, self._back = False, None
        self._store.num_dropped = lost
        self._store.apply(events)
        for line in self._tap.drain() if self._tap is not None else ():
            self._store.log.add(line)
        return events

    async def _fetch_snapshot(self) -> None:
        may_ask = self._stream is not None or self._client.is_healthy  # a stream has the last one
        if self._paused or not may_ask:
            return
        try:
            async with asyncio.timeout(SNAPSHOT_S):
                snapshot = await self._client.snapshot()
        except (EngineError, TimeoutError):
            return  # the header and the log page say so
        self._snapshot_ns = self._now_ns()
        self._snapshot_idle = not snapshot.num_running and not snapshot.num_waiting
        self._store.set_snapshot(snapshot)

    def _observe(self) -> None:
        now = (self._now_ns(), self._cpu_ns())
        if self._observed is not None and now[0] > self._observed[0]:
            share = (now[1] - self._observed[1]) / (now[0] - self._observed[0])
            old = self._observer_share
            self._observer_share = (
                share if old is None else old + OBSERVER_SMOOTHING * (share - old)
            )
        self._observed = now

    def paint(self) -> None:
        shows_overview = self._page == "overview"
        for canvas in self.query(Canvas):
            if canvas.display and (shows_overview or canvas.id in ("header", "tabs", "page")):
                canvas.repaint()

    def action_page(self, name: str) -> None:
        """Show one of the `PAGES`."""
        self._page = name
        self.query_one("#overview").display = name == "overview"
        self.query_one("#page").display = name != "overview"
        self.paint()

    def action_window(self) -> None:
        """The next length of time for the series, and for step times."""
        self._window_s = WINDOWS_S[(WINDOWS_S.index(self._window_s) + 1) % len(WINDOWS_S)]
        self._view = replace(self._view, window_s=self._window_s)
        self.action_page("overview")

    def action_log_level(self) -> None:
        self._pages.log_level = Level((self._pages.log_level + 1) % len(Level))
        self.action_page("log")

    def action_search(self) -> None:
        self.action_page("log")
        search = self.query_one("#search", Input)
        search.display = True
        search.focus()

    @on(Input.Changed, "#search")
    def _look_for(self, event: Input.Changed) -> None:
        self._pages.search = event.value
        self.paint()

    @on(Input.Submitted, "#search")
    def _keep_search(self) -> None:
        """The words stay; the keys are the dashboard's again."""
        self.query_one("#search").display = False
        self.set_focus(None)

    def on_click(self, event: Click) -> None:
        where = event.widget.id if event.widget is not None else None
        if where == "tabs" and (name := page_at(event.x, self.pages)) is not None:
            self.action_page(name)
        elif where == "requests":
            self._mark_row(event.y)
        elif where == "blocks":
            self.action_page("blocks")

    def _mark_row(self, y: int) -> None:
        """Mark the request of a row of the table; show it when it is marked already."""
        frame = self._frame(*self.query_one("#requests", Canvas).size)
        row = row_at(y, self._view, frame, first=self._first_row)
        if row is not None and row.request_id == self._selected:
            self.action_page("request")
        elif row is not None:
            self._selected = row.request_id
            self.paint()

    def on_mouse_move(self, event: MouseMove) -> None:
        """The block under the mouse is the one that is asked about."""
        if self._page == "blocks" and event.widget is not None and event.widget.id == "page":
            edge = 2 if self._boxed else 1
            if self._pages.kv_cursor.point(event.x - edge, event.y - 1):
                self.paint()

    def action_zoom(self, by: int) -> None:
        self._pages.zoom(self._page, by)
        self.paint()

    def action_pause(self) -> None:
        self._freeze(not self._paused)
        if not self._paused:
            self._back = None
        self.paint()

    def _freeze(self, paused: bool) -> None:
        self._paused = paused
        if self._replay is not None:
            self._replay.stop(paused)

    async def action_seek(self, seconds: int) -> None:
        if self._is_recording():
            assert self._replay is not None
            self._ring.drain()
            self._replay.seek(seconds * 1_000_000_000)
            self._take_events()
            self._store.set_snapshot(await self._replay.snapshot())
            self._back = None
            self._view = self._store.view(self._now_ns(), window_s=self._window_s)
            self.paint()

    def action_speed(self, by: int) -> None:
        if self._is_recording():
            assert self._replay is not None
            self._replay.set_speed(2.0**by)
            self.paint()

    def _is_recording(self) -> bool:
        if self._replay is None:
            self.notify("only a recording can be turned: termgen top --replay FILE")
        return self._replay is not None

    def action_step(self, back: int) -> None:
        """Freeze, and move the mark among the recorded steps; move in the map of the blocks."""
        if self._page == "blocks":
            self._pages.kv_cursor.move(columns=-back)
            self.paint()
            return
        if not self._view.steps:
            return
        self._freeze(True)
        self._back = min(len(self._view.steps) - 1, max(0, (self._back or 0) + back))
        self.paint()

    def action_select(self, by: int) -> None:
        if self._page == "blocks":
            self._pages.kv_cursor.move(rows=by)
            self.paint()
            return
        ids = [row.request_id for row in self._view.requests]
        if not ids:
            return
        if self._selected in ids:
            index = min(len(ids) - 1, max(0, ids.index(self._selected) + by))
        else:
            index = 0
        self._selected = ids[index]
        self._bring_into_view(index)
        self.paint()

    def action_live(self) -> None:
        search = self.query_one("#search", Input)
        search.value, search.display = "", False
        self.set_focus(None)
        self._freeze(False)
        self._back, self._selected, self._first_row = None, None, 0
        self.paint()

    @on(MouseScrollDown)
    def _next_request(self) -> None:
        self.action_select(1)

    @on(MouseScrollUp)
    def _previous_request(self) -> None:
        self.action_select(-1)

    def _bring_into_view(self, index: int) -> None:
        canvas = self.query_one("#requests", Canvas)
        shown = max(1, self._frame(*canvas.size).inner_height - 1)
        self._first_row = min(index, max(self._first_row, index - shown + 1))

    @property
    def _boxed(self) -> bool:
        return self.size.width >= BOX_COLUMNS and self.size.height >= BOX_ROWS

    @property
    def _trouble(self) -> str:
        """What is wrong when the engine is not healthy."""
        return (self._stream.trouble if self._stream else "") or "engine stopped"

    def _frame(self, width: int, height: int) -> Frame:
        return Frame(width, height, self._boxed)

    def _framed(
        self, renderer: Callable[[DashboardView, Frame], list[Row]]
    ) -> Callable[[int, int], Sequence[Row]]:
        return lambda width, height: renderer(self._view, self._frame(width, height))

    def _paint_header(self, width: int, _height: int) -> Sequence[Row]:
        live = LiveState(
            hz=self._hz,
            paused=self._paused,
            healthy=self._client.is_healthy,
            observer_share=self._observer_share,
            back=self._back or 0,
            trouble=self._trouble,
            replay=_replay_words(self._replay) if self._replay else "",
        )
        return [overview.header(self._client.model, self._view, live, width)]

    def _paint_gauges(self, width: int, height: int) -> Sequence[Row]:
        return overview.gauges_tile(self._view, self._frame(width, height), self._gpu.reading)

    def _paint_numbers(self, width: int, _height: int) -> Sequence[Row]:
        return [overview.numbers_line(self._view, width, self._gpu.reading)]

    def _paint_sparks(self, width: int, _height: int) -> Sequence[Row]:
        return [overview.sparks_line(self._view, width)]

    def _paint_batch(self, width: int, height: int) -> Sequence[Row]:
        frame = self._frame(width, height)
        return batch_panel(self._view.steps, frame, self.palette.glyphs, cursor=self._back)

    def _paint_blocks(self, width: int, height: int) -> Sequence[Row]:
        frame = self._frame(width, height)
        return kv_panel(self._view, frame, self.palette.glyphs, selected=self._selected)

    def _paint_requests(self, width: int, height: int) -> Sequence[Row]:
        frame = self._frame(width, height)
        return requests_panel(
            self._view,
            frame,
            self.palette.glyphs,
            selected=self._selected,
            first=self._first_row,
        )

    def _paint_page(self, width: int, height: int) -> Sequence[Row]:
        sight = Sight(
            view=self._view,
            lanes=self._store.lanes,
            model=self._client.model,
            glyphs=self.palette.glyphs,
            boxed=self._boxed,
            back=self._back,
            selected=self._selected,
            log=self._store.log,
            trouble="" if self._client.is_healthy else self._trouble,
            observer_share=self._observer_share,
        )
        return self._pages.paint(self._page, sight, width, height)


def _replay_words(replay: ReplayFeed) -> str:
    """`0:12/1:40`, with the speed when it is not that of life."""
    speed = "" if replay.speed == 1 else f" ×{replay.speed:g}"
    return f"{clock(replay.position_ns / 1e9)}/{clock(replay.length_ns / 1e9)}{speed}"
