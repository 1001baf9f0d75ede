"""The app of `termgen bench --watch`: the bench first, the engine of its server one key away.

The bench itself runs elsewhere: the app calls `begin` when the screen is mounted, shows what `read`
returns, calls `stop` on request, and `open_feed` when the engine's page is first opened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from termgen.config import UIConfig
from termgen.errors import TermgenError
from termgen.system.remembered import Remembered
from termgen.tui.bench.bench_screen import BenchEngineScreen, BenchScreen, bench_engine_keys
from termgen.tui.bench.bench_view import BenchView
from termgen.tui.feed_app import FeedApp
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.help import HelpSection
from termgen.tui.silent import SilentScreen


class BenchApp(FeedApp):
    interrupt_help = "Stop the run and keep what is measured; leave when there is none"

    def __init__(
        self,
        read: Callable[[], BenchView],
        *,
        begin: Callable[[], object],
        stop: Callable[[], None],
        open_feed: Callable[[], Awaitable[StreamFeed]],
        ui: UIConfig,
        theme_folders: tuple[Path, ...] | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        super().__init__(
            ui=ui, start_screen="bench", theme_folders=theme_folders, remembered=remembered
        )
        self.bench = BenchScreen(read, stop=stop, hz=ui.dashboard_hz)
        self._begin = begin
        self._open_feed = open_feed

    async def open_screens(self, report: Callable[[str, float], None]) -> None:
        self.add_mode("bench", lambda: self.bench)
        self.add_dashboard(SilentScreen("nothing was asked of it yet"))
        self._begin()

    async def action_show(self, name: str) -> None:
        """Show `bench` or `dashboard`; the engine's events are asked for when it is first shown."""
        if name == "dashboard" and self._feed is None:
            try:
                feed = self._feed = await self._open_feed()
            except TermgenError as error:
                self.notify(str(error), title="no engine to watch", markup=False)
                return
            await self.remove_mode("dashboard")
            screen = BenchEngineScreen(feed, now_ns=feed.now_ns, **self.dashboard_options)
            self.add_dashboard(screen)
        await super().action_show(name)

    def action_interrupt(self) -> None:
        """ctrl+c: stop the run and keep what is measured; leave when there is none."""
        if self.bench.is_measuring:
            self.bench.action_stop()
        else:
            self.exit()

    def help_sections(self) -> list[HelpSection]:
        here: list[HelpSection] = [
            ("Bench", BenchScreen.BINDINGS),
            ("Engine", bench_engine_keys()),
        ]
        if self._shown == "dashboard":
            here.reverse()
        return self.help_of(here)
