"""The engine screen: reads the engine's events a few times a second, and paints.

It computes nothing (`state` does) and styles nothing (`pages` and the theme do).

While it is hidden nothing runs: the ring overwrites its oldest events, and what is still there
when the screen comes back fills its history.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.binding import ActiveBinding
from textual.events import (
    Click,
    MouseMove,
    MouseScrollDown,
    MouseScrollUp,
    ScreenResume,
    ScreenSuspend,
)
from textual.widgets import Footer, Input

from termgen.system.gpu_meter import GpuWatch
from termgen.tui.dashboard.dashboard_keys import (
    KEYS,
    PAGES,
    Page,
    footer_keys,
    page_at,
    tab_line,
)
from termgen.tui.dashboard.dashboard_pages import Pages, Sight
from termgen.tui.dashboard.pages import overview
from termgen.tui.dashboard.pages.batch import batch_panel
from termgen.tui.dashboard.pages.kv_map import kv_panel
from termgen.tui.dashboard.pages.overview import LiveState
from termgen.tui.dashboard.pages.requests import requests_panel, row_at
from termgen.tui.dashboard.state.event_reader import EventReader
from termgen.tui.dashboard.state.gpu_figures import held_clocks
from termgen.tui.dashboard.state.limits import Limit, limit_of, why_slow_start
from termgen.tui.dashboard.state.log import Level
from termgen.tui.dashboard.state.past import as_of
from termgen.tui.dashboard.state.store import DashboardView, figures_of
from termgen.tui.dashboard.trace_export import events_between, export_trace
from termgen.tui.feeds.feed import EngineFeed, StreamFeed
from termgen.tui.keys.keymap import KeyedApp, key_of
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.canvas_screen import CanvasScreen, Column, Line
from termgen.tui.paint.formatting import plural
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.spans import Row, row_width, spread
from termgen.vocabulary.alerts import AlertLimits
from termgen.vocabulary.device.gpu_reading import GpuHistory
from termgen.vocabulary.events import StepRecord

BOX_COLUMNS, BOX_ROWS = 100, 34
WINDOWS_S = (None, 30, 60, 120, 600, 3600)
LIMIT_NS = 500_000_000
BELL_NS = 60_000_000_000
IDLE_PAINT_NS = 1_000_000_000
"""While nothing happens, only ages and uptime change."""
OBSERVER_SMOOTHING = 0.2


class DashboardScreen(CanvasScreen):
    AUTO_FOCUS = ""  # the search is shown when asked for; until then keys are the screen's
    BINDINGS = [*KEYS]

    pages: tuple[Page, ...] = PAGES
    """The pages, with their present keys."""

    def __init__(
        self,
        client: EngineFeed,
        *,
        hz: float,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        is_alone: bool = False,
        alerts: AlertLimits = (),
        bell: bool = False,
    ) -> None:
        """is_alone: nothing but this screen is there to be left, so q leaves the program.
        bell: ring while a limit of `alerts` is exceeded."""
        super().__init__()
        self._alerts = alerts
        self._bell = bell
        self._rung_ns: int | None = None
        self._is_alone = is_alone
        self._client = client
        self._hz = hz
        self._now_ns = now_ns
        self._cpu_ns = cpu_ns
        self._event_reader = EventReader(client, now_ns)
        self._view: DashboardView = self._event_reader.store.view(now_ns())
        self._lanes = self._event_reader.store.history
        self._kept = self._event_reader.store.kept()
        """What there is to step back through, since the display was frozen."""
        self._past: tuple[DashboardView, int, DashboardView] | None = None
        """(view, steps back, the view at that step)."""
        self._limited: tuple[DashboardView, Limit | None] | None = None
        """What limited the engine at the last view that was looked at for it."""
        self._shown_trouble = ""
        self._observed: tuple[int, int] | None = None
        self._observer_share: float | None = None
        self._paused = False
        self._back: int | None = None
        self._selected: str | None = None
        self._first_row = 0
        self._page = "overview"
        self._window_s: int | None = None
        self._pages = Pages()
        is_here = not isinstance(client, StreamFeed)
        self._gpu = GpuWatch(client.model.device) if is_here else None
        """Meter of this machine's GPU; a stream brings the figures of its own."""
        self._gpus: GpuHistory = ()

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint_header, id="header")
        yield Canvas(self._paint_tabs, id="tabs")
        with Column(id="overview"):
            yield Canvas(self._paint_numbers, id="numbers")
            with Line(id="tiles"):
                yield Canvas(self._framed(overview.decode_tile), id="decode")
                yield Canvas(self._framed(overview.prefill_tile), id="prefill")
                yield Canvas(self._framed(overview.latency_tile), id="latency")
                yield Canvas(
                    lambda w, h: overview.gauges_tile(
                        self._then, self._frame(w, h), self._gpus_then
                    ),
                    id="gauges",
                )
            yield Canvas(self._paint_batch, id="batch")
            yield Canvas(self._paint_blocks, id="blocks")
            yield Canvas(self._paint_requests, id="requests")
        yield Canvas(self._paint_page, id="page")
        yield Input(placeholder="words in the log", id="search", compact=True, max_length=200)
        yield Footer(show_command_palette=False)

    @property
    def view(self) -> DashboardView:
        """The figures on the screen."""
        return self._view

    @property
    def is_live(self) -> bool:
        """True if nothing is frozen, marked or searched for: esc has nothing to undo."""
        search = self.query_one("#search", Input)
        return not (self._paused or self._selected or search.display or search.value)

    async def read(self) -> DashboardView:
        """The newest figures, for a list of servers; nothing is drawn."""
        if self._event_reader.should_ask(await self._event_reader.take()):
            await self._event_reader.ask()
        return replace(self._event_reader.store.view(self._now_ns()), alert_limits=self._alerts)

    def close(self) -> None:
        """Stop listening to the engine."""
        self._event_reader.close()

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
        if self._gpu is not None:
            await self._gpu.follow()

    @work(group="pump", exclusive=True)
    async def _pump(self) -> None:
        """The one timer of the screen. A step that takes long delays a frame, never a key."""
        while True:
            await self.refresh_view()
            await asyncio.sleep(1 / self._hz)

    async def refresh_view(self) -> None:
        """One frame: events, snapshot, view, paint; no paint where nothing would differ."""
        changed = await self._event_reader.take()
        if not self._paused and self._event_reader.should_ask(changed):
            changed |= await self._event_reader.ask()
        self._observe()
        is_old = self._now_ns() - self._view.now_ns >= IDLE_PAINT_NS
        if not self._paused and (changed or is_old or not self._view.is_idle):
            self._look()
            self.paint()
        elif self._event_reader.trouble != self._shown_trouble:
            self.paint()

    def _look(self) -> None:
        """Take the picture that is painted from now on."""
        store = self._event_reader.store
        self._view = store.view(self._now_ns(), window_s=self._window_s)
        if self._alerts:
            self._view = replace(self._view, alert_limits=self._alerts)
            self._ring_bell()
        self._gpus = self._gpu_history()
        self.set_class(bool(self._gpus), "-gpu")
        self.set_class(any(one.power_w is not None for one in self._gpus[-1:]), "-power")
        self._lanes = store.history
        if self._paused:
            self._keep()
        if self._lanes.get(self._selected) is None:  # of another engine, or not yet there
            self._selected, self._first_row = None, 0

    def _gpu_history(self) -> GpuHistory:
        if isinstance(self._client, StreamFeed):
            return self._client.gpu_history
        return self._gpu.history if self._gpu is not None else ()

    def _ring_bell(self) -> None:
        now_ns = self._view.now_ns
        if not self._bell or self._paused or not self._view.beyond:
            return
        if self._rung_ns is None or not 0 <= now_ns - self._rung_ns < BELL_NS:
            self._rung_ns = now_ns
            self.app.bell()

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
        self._shown_trouble = self._event_reader.trouble
        self.draw(
            canvas
            for canvas in self._canvases
            if canvas.display and (shows_overview or canvas.id in ("header", "tabs", "page"))
        )

    def action_page(self, name: str) -> None:
        """Show one of the `PAGES`."""
        if name != "log":
            self._close_search()
        self._page = name
        self.query_one("#overview").display = name == "overview"
        self.query_one("#page").display = name != "overview"
        self.refresh_bindings()
        self.paint()

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """Bindings with their meaning on this page: the footer shows those that have an effect."""
        found = super().active_bindings
        assert isinstance(self.app, KeyedApp)
        shown = footer_keys(
            self._page,
            self.app.first_keys,
            is_replay=self._event_reader.replay is not None,
            leaves=self._is_alone,
        )
        for key, active in found.items():
            name = active.binding.id or ""
            if name in shown:
                keys, words = shown[name]
                binding = replace(active.binding, description=words, key_display=keys, show=True)
            elif name.startswith("dashboard.") and name not in (
                "dashboard.chat",
                "dashboard.bench",
            ):
                binding = replace(active.binding, show=False)
            elif name == "app.quit" and self._is_alone:
                binding = replace(active.binding, show=False)
            else:
                continue
            found[key] = active._replace(binding=binding)
        return found

    async def action_leave(self) -> None:
        """q: quit where nothing but the picture ends; elsewhere say how to leave."""
        if self._is_alone:
            self.app.exit()
        else:
            key = key_of(self, "app.quit")
            self.notify(f"{key} quits, and ends the engine with all that runs")

    def action_window(self) -> None:
        """The next length of time for the series, and for step times."""
        self._window_s = WINDOWS_S[(WINDOWS_S.index(self._window_s) + 1) % len(WINDOWS_S)]
        if self._paused:
            kept, view = self._kept, self._view
            figures = figures_of(kept.figures, kept.coarse, view.now_ns, self._window_s)
            self._view = replace(view, window_s=self._window_s, **figures)
        else:
            self._look()
        self.action_page("overview")

    @work(group="trace", exclusive=True)
    async def action_export_trace(self) -> None:
        """Write the events of the time window, up to the marked step, into the current folder."""
        end_ns, window_s = self._then.now_ns, self._window_s
        begin_ns = end_ns - window_s * 1_000_000_000 if window_s else 0
        events = events_between(self._event_reader.events, begin_ns, end_ns)
        if not any(isinstance(event, StepRecord) for event in events):
            self.notify("there is no step to write yet", severity="warning")
            return
        try:
            path, totals = await asyncio.to_thread(
                export_trace, Path.cwd(), events, self._client.model
            )
        except OSError as error:
            self.notify(f"the trace cannot be written: {error.strerror}", severity="error")
            return
        length = f"{plural(totals.num_steps, 'step')}, {totals.length_ns / 1e9:.1f} s"
        self.notify(f"{path}: {length}; open it at https://ui.perfetto.dev", markup=False)

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
    def _close_search(self) -> None:
        """The words stay; the keys are the dashboard's again."""
        self.query_one("#search").display = False
        self.set_focus(None)

    def on_click(self, event: Click) -> None:
        where = event.widget.id if event.widget is not None else None
        if (
            where == "tabs"
            and (name := page_at(event.x, self.pages, on_cpu=self._then.on_cpu)) is not None
        ):
            self.action_page(name)
        elif where == "requests":
            self._mark_row(event.y)
        elif where == "blocks":
            self.action_page("blocks")

    def _mark_row(self, y: int) -> None:
        """Mark the request of a row of the table; show it when it is marked already."""
        frame = self._frame(*self.query_one("#requests", Canvas).size)
        row = row_at(y, self._then, frame, first=self._first_row)
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
        if paused and not self._paused:
            self._keep()
        self._paused = paused
        if self._event_reader.replay is not None:
            self._event_reader.replay.stop(paused)

    def _keep(self) -> None:
        """Take copies of what goes on changing while the display is frozen."""
        store = self._event_reader.store
        self._lanes, self._kept = store.history.copy(), store.kept()

    def action_seek(self, seconds: int) -> None:
        if self._is_recording():
            self._event_reader.turn(seconds * 1_000_000_000)
            self._back = None
            self._show_turned()

    @work(group="turn", exclusive=True)
    async def _show_turned(self) -> None:
        """A key that comes meanwhile turns further, and this begins again."""
        await self._event_reader.take()
        await self._event_reader.ask()
        self._look()
        self.paint()

    def action_speed(self, by: int) -> None:
        if self._is_recording():
            assert self._event_reader.replay is not None
            self._event_reader.replay.set_speed(2.0**by)
            self.paint()

    def _is_recording(self) -> bool:
        if self._event_reader.replay is None:
            self.notify("only a recording can be turned: termgen top --replay FILE")
        return self._event_reader.replay is not None

    def action_step(self, back: int) -> None:
        """Freeze, and move the mark among the recorded steps; move in the map of the blocks, and
        in the log."""
        if self._pages.move(self._page, columns=-back):
            self.paint()
            return
        if not self._view.steps:
            return
        self._freeze(True)
        self._back = min(len(self._view.steps) - 1, max(0, (self._back or 0) + back))
        self.paint()

    def action_select(self, by: int) -> None:
        if self._pages.move(self._page, rows=by):
            self.paint()
            return
        ids = [row.request_id for row in self._then.requests]
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
        search.value = ""
        if search.display:  # its end and no more
            self._close_search()
            return
        self._freeze(False)
        self._pages.log_scroll.follow()
        self._back, self._selected, self._first_row = None, None, 0
        self.paint()

    @on(MouseScrollDown)
    @on(MouseScrollUp)
    def _turn_wheel(self, event: MouseScrollDown | MouseScrollUp) -> None:
        self.action_select(1 if isinstance(event, MouseScrollDown) else -1)

    def _bring_into_view(self, index: int) -> None:
        canvas = self.query_one("#requests", Canvas)
        shown = max(1, self._frame(*canvas.size).inner_height - 1)
        self._first_row = min(index, max(self._first_row, index - shown + 1))

    @property
    def _boxed(self) -> bool:
        return self.size.width >= BOX_COLUMNS and self.size.height >= BOX_ROWS

    def _frame(self, width: int, height: int) -> Frame:
        return Frame(width, height, self._boxed)

    def _framed(
        self, renderer: Callable[[DashboardView, Frame], list[Row]]
    ) -> Callable[[int, int], Sequence[Row]]:
        return lambda width, height: renderer(self._then, self._frame(width, height))

    def _paint_tabs(self, width: int, height: int) -> Sequence[Row]:
        """The pages, and what limits now where there is room."""
        left = tab_line(self._page, self.pages, on_cpu=self._then.on_cpu)
        room = width - row_width(left) - 2
        then = self._then
        held = held_clocks(then, self._gpus_then)
        right = overview.limit_spans(self._limit(), why_slow_start(then), room, held)
        return [spread(left, [*right, (" ", "text")], width) if right else left]

    def _paint_numbers(self, width: int, height: int) -> Sequence[Row]:
        return overview.numbers_lines(
            self._then, width, height, self._gpus_then, limit=self._limit()
        )

    def _limit(self) -> Limit | None:
        """Twice a second at most: a line that changes with every frame cannot be read."""
        then, kept = self._then, self._limited
        if kept is not None and kept[1] is not None and not then.is_past:
            if 0 <= then.now_ns - kept[0].now_ns < LIMIT_NS:
                return kept[1]
        self._limited = then, limit_of(then, self._client.model.memory)
        return self._limited[1]

    def _paint_header(self, width: int, _height: int) -> Sequence[Row]:
        live = LiveState(
            hz=self._hz,
            paused=self._paused,
            healthy=not self._event_reader.trouble,
            observer_share=self._observer_share,
            back=self._back or 0,
            trouble=self._event_reader.trouble,
            replay=self._event_reader.replay.words if self._event_reader.replay else "",
        )
        return [overview.header(self._client.model, self._then, live, width)]

    @property
    def _then(self) -> DashboardView:
        """The view at the marked step, if an earlier one is marked."""
        view, back = self._view, self._back
        if not back:
            return view
        if self._past is None or self._past[0] is not view or self._past[1] != back:
            self._past = (view, back, as_of(view, back, self._kept, self._lanes))
        return self._past[2]

    @property
    def _gpus_then(self) -> GpuHistory:
        if not self._then.is_past:
            return self._gpus
        return tuple(reading for reading in self._gpus if reading.time_ns <= self._then.now_ns)

    def _paint_batch(self, width: int, height: int) -> Sequence[Row]:
        frame = self._frame(width, height)
        return batch_panel(self._then, frame, self.palette.glyphs, cursor=self._back)

    def _paint_blocks(self, width: int, height: int) -> Sequence[Row]:
        frame, glyphs = self._frame(width, height), self.palette.glyphs
        groups = self._client.model.cache_groups
        return kv_panel(self._then, frame, glyphs, selected=self._selected, groups=groups)

    def _paint_requests(self, width: int, height: int) -> Sequence[Row]:
        return requests_panel(
            self._then,
            self._frame(width, height),
            self.palette.glyphs,
            selected=self._selected,
            first=self._first_row,
            has_chat=self.app.check_action("show", ("chat",)) is not False,
        )

    def _paint_page(self, width: int, height: int) -> Sequence[Row]:
        if self._page == "overview":
            return ()  # resized after another page had taken its place
        sight = Sight(
            view=self._then,
            present=self._view,
            gpu=self._gpus_then,
            lanes=self._lanes,
            model=self._client.model,
            glyphs=self.palette.glyphs,
            boxed=self._boxed,
            back=self._back,
            selected=self._selected,
            log=self._event_reader.store.log,
            trouble=self._event_reader.trouble,
            observer_share=self._observer_share,
        )
        return self._pages.paint(self._page, sight, width, height)
