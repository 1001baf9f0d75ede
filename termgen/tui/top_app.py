"""`termgen top`: the dashboard alone, of a server elsewhere or of a recording."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from textual.app import SystemCommand
from textual.binding import Binding
from textual.screen import Screen

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.tui.app import TermgenApp
from termgen.tui.attach import RemoteFeed
from termgen.tui.feed import StreamFeed
from termgen.tui.screens.dashboard import DashboardScreen
from termgen.tui.screens.help import HelpSection


class TopApp(TermgenApp):
    """A feed takes the place of the engine, and there is no chat."""

    def __init__(
        self,
        open_feed: Callable[[], Awaitable[StreamFeed]],
        *,
        ui: UIConfig,
        theme_folders: tuple[Path, ...] | None = None,
    ) -> None:
        super().__init__(
            self._start_nothing,
            stop_engine=self._close_feed,
            ui=ui,
            start_screen="dashboard",
            theme_folders=theme_folders,
        )
        self._open_feed = open_feed
        self._feed: StreamFeed | None = None

    async def open_screens(self, report: Callable[[str, float], None]) -> None:
        report("connecting", 0.0)
        feed = self._feed = await self._open_feed()
        self.add_dashboard(self.make_feed_dashboard(feed))

    def make_feed_dashboard(self, feed: StreamFeed) -> DashboardScreen:
        return DashboardScreen(feed, hz=self.ui.dashboard_hz, now_ns=feed.now_ns)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of a chat do nothing, and the footer leaves them out."""
        if action == "show" and parameters == ("chat",):
            return False
        return super().check_action(action, parameters)

    def help_sections(self) -> list[HelpSection]:
        here = [
            b
            for b in DashboardScreen.BINDINGS
            if not (isinstance(b, Binding) and b.id == "dashboard.chat")
        ]
        return [("Engine", here), ("Everywhere", self.BINDINGS)]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in super().get_system_commands(screen):
            if command.title != "Chat":
                yield command

    async def _start_nothing(self, _report: Callable[[str, float], None]) -> EngineClient:
        raise AssertionError("`termgen top` has no engine")

    async def _close_feed(self) -> None:
        feed, self._feed = self._feed, None
        if isinstance(feed, RemoteFeed):
            await feed.close()
