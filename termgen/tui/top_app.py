"""`termgen top`: the dashboard alone, of a server elsewhere or of a recording."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from termgen.config import UIConfig
from termgen.tui.feed import StreamFeed
from termgen.tui.feed_app import FeedApp
from termgen.tui.screens.dashboard import DashboardScreen
from termgen.tui.screens.help import HelpSection


class TopApp(FeedApp):
    interrupt_help = "Copy the selection; twice: quit"

    def __init__(
        self,
        open_feed: Callable[[], Awaitable[StreamFeed]],
        *,
        ui: UIConfig,
        theme_folders: tuple[Path, ...] | None = None,
    ) -> None:
        super().__init__(ui=ui, start_screen="dashboard", theme_folders=theme_folders)
        self._open_feed = open_feed
        self.report: Callable[[str, float], None] = lambda phase, progress: None
        """Shows on the loading screen how far `open_feed` is: a server may have to load first."""

    async def open_screens(self, report: Callable[[str, float], None]) -> None:
        report("connecting", 0.0)
        self.report = report
        feed = self._feed = await self._open_feed()
        self.add_dashboard(self.make_feed_dashboard(feed))

    def make_feed_dashboard(self, feed: StreamFeed) -> DashboardScreen:
        return DashboardScreen(feed, hz=self.ui.dashboard_hz, now_ns=feed.now_ns, is_alone=True)

    def help_sections(self) -> list[HelpSection]:
        return self.help_of([("Engine", DashboardScreen.BINDINGS)])
