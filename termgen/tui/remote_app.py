"""The app of `termgen chat --url`: the engine is elsewhere, and so is what the dashboard shows.

A termgen server is watched through its event stream, as `termgen top` does; of any other one the
engine screen says that there is nothing to see.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from termgen.errors import TermgenError
from termgen.tui.app import TermgenApp
from termgen.tui.feed import StreamFeed
from termgen.tui.screens.dashboard import DashboardScreen
from termgen.tui.screens.silent import SilentScreen


class RemoteApp(TermgenApp):
    """`open_feed` is called once there is a client; its `TermgenError` says why there is none."""

    def __init__(
        self,
        *arguments: Any,
        open_feed: Callable[[], Awaitable[StreamFeed]],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._open_feed = open_feed
        self._feed: StreamFeed | None = None

    async def open_screens(self, report: Callable[[str, float], None]) -> None:
        report("connecting", 0.0)
        client = self.client = await self._start_engine(report)
        self.add_mode("chat", lambda: self.make_chat(client))
        try:
            feed = self._feed = await self._open_feed()
        except TermgenError as error:
            self.add_dashboard(SilentScreen(str(error)))
            return
        self.add_dashboard(DashboardScreen(feed, hz=self.ui.dashboard_hz, now_ns=feed.now_ns))

    async def on_unmount(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()
