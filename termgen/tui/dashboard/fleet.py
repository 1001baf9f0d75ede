"""Several servers on one screen: a line for each, and their dashboards behind it.

Each server has a task of its own that connects to it, and again when it was not there: one that is
dead or slow holds up no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from textual import on, work
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding
from textual.events import Click, MouseScrollDown, MouseScrollUp, ScreenResume, ScreenSuspend
from textual.widgets import Footer

from termgen.errors import TermgenError
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.pages.fleet_rows import ServerLine, fleet_rows
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.canvas_screen import CanvasScreen
from termgen.tui.paint.formatting import plural
from termgen.tui.paint.spans import Row, spread

LOOK_S = 1.0
RETRY_S = 2.0

Report = Callable[[str, float], None]
OpenFeed = Callable[[Report], Awaitable[StreamFeed]]
"""Connects to one server; a server that loads reports its phases."""

KEYS = [
    Binding(
        "up", "choose(-1)", "Server", id="fleet.up", key_display="↑↓", tooltip="The server above"
    ),
    Binding("down", "choose(1)", "Below", show=False, id="fleet.down", tooltip="The server below"),
    Binding("enter", "open", "Open", id="fleet.open", tooltip="The dashboard of this server"),
    Binding("q", "leave", "Quit", id="fleet.leave", tooltip="Leave the list of servers"),
]


class ServerScreen(DashboardScreen):
    """The dashboard of one server of several: esc leads back to the list from the live view."""

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        found = super().active_bindings
        for key, active in found.items():
            if active.binding.id == "dashboard.live":
                binding = replace(active.binding, description="List", show=self.is_live)
                found[key] = active._replace(binding=binding)
        return found

    def action_live(self) -> None:
        if self.is_live:
            self.app.pop_screen()
        else:
            super().action_live()


@dataclass(slots=True)
class Watched:
    """One server."""

    url: str
    open_feed: OpenFeed
    feed: StreamFeed | None = None
    screen: ServerScreen | None = None
    line: ServerLine | None = None


class FleetScreen(CanvasScreen):
    """make_screen: the dashboard of a feed, which listens from then on."""

    AUTO_FOCUS = ""
    BINDINGS = [*KEYS]

    def __init__(
        self,
        servers: Sequence[tuple[str, OpenFeed]],
        *,
        make_screen: Callable[[StreamFeed], ServerScreen],
    ) -> None:
        super().__init__()
        self._make_screen = make_screen
        self._servers = [Watched(url, open_feed) for url, open_feed in servers]
        self._tasks: list[asyncio.Task[None]] = []
        self._chosen = 0
        self._first = 0

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint_header, id="header")
        yield Canvas(self._paint_servers, id="servers")
        yield Footer(show_command_palette=False)

    def follow(self) -> None:
        """Connect to all servers."""
        self._tasks = [asyncio.create_task(self._connect(server)) for server in self._servers]

    def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        for server in self._servers:
            if server.screen is not None:
                server.screen.close()

    async def close_feeds(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            if server.feed is not None:
                await server.feed.close()

    async def _connect(self, server: Watched) -> None:
        """Until it is there: a feed finds a lost server again by itself."""

        def report(phase: str, _progress: float) -> None:
            server.line = ServerLine(server.url, trouble=phase)

        while server.feed is None:
            try:
                server.feed = await server.open_feed(report)
            except TermgenError as error:
                server.line = ServerLine(server.url, trouble=str(error))
                await asyncio.sleep(RETRY_S)
            except Exception as error:  # the top of the task: the line says why nothing comes
                why = f"watching ended: {type(error).__name__}: {error}"
                server.line = ServerLine(server.url, trouble=why)
                return
        server.screen = self._make_screen(server.feed)

    @on(ScreenResume)
    def _start_looking(self) -> None:
        self._look_on()

    @on(ScreenSuspend)
    def _stop_looking(self) -> None:
        self.workers.cancel_group(self, "look")

    @work(group="look", exclusive=True)
    async def _look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """The newest figures of all servers, drawn."""
        for server in self._servers:
            if server.feed is not None and server.screen is not None:
                view = await server.screen.read()
                server.line = ServerLine(server.url, server.feed.model, view, server.feed.trouble)
        self.draw(self._canvases)

    def action_choose(self, by: int) -> None:
        self._chosen = min(len(self._servers) - 1, max(0, self._chosen + by))
        shown = max(1, self.query_one("#servers", Canvas).size.height - 1)
        self._first = min(self._chosen, max(self._first, self._chosen - shown + 1))
        self.draw(self._canvases)

    def action_open(self) -> None:
        screen = self._servers[self._chosen].screen
        if screen is None:
            self.notify("this server was not there yet", severity="warning")
            return
        name = f"server-{self._chosen}"
        if not self.app.is_screen_installed(name):
            self.app.install_screen(screen, name)
        self.app.push_screen(name)

    def action_leave(self) -> None:
        self.app.exit()

    def on_click(self, event: Click) -> None:
        """A click marks a line, one on the marked line opens it."""
        row = self._first + event.y - 1
        inside = event.widget is not None and event.widget.id == "servers" and event.y > 0
        if not inside or row >= len(self._servers):
            return
        if row == self._chosen:
            self.action_open()
        else:
            self.action_choose(row - self._chosen)

    @on(MouseScrollDown)
    @on(MouseScrollUp)
    def _turn_wheel(self, event: MouseScrollDown | MouseScrollUp) -> None:
        self.action_choose(1 if isinstance(event, MouseScrollDown) else -1)

    def _paint_header(self, width: int, _height: int) -> Sequence[Row]:
        well = sum(not line.trouble and line.view is not None for line in self._lines)
        words = f"{well} of {plural(len(self._servers), 'server')} reachable "
        left = [(" termgen", "accent/b"), (" ▸ ", "faint"), ("servers", "text/b")]
        return [spread(left, [(words, "muted")], width)]

    def _paint_servers(self, width: int, height: int) -> Sequence[Row]:
        return fleet_rows(self._lines, width, height, chosen=self._chosen, first=self._first)

    @property
    def _lines(self) -> list[ServerLine]:
        return [server.line or ServerLine(server.url) for server in self._servers]
