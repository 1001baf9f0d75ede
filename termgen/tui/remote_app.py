"""The chat's app over a server elsewhere: its engine is watched through the server's event stream.

`termgen chat --url` is made on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from termgen.errors import TermgenError
from termgen.tui.app import TermgenApp
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.silent import SilentScreen


class RemoteApp(TermgenApp):
    def __init__(
        self,
        *arguments: Any,
        open_feed: Callable[[], Awaitable[StreamFeed]],
        found_notice: Callable[[], str] = str,
        **options: Any,
    ) -> None:
        """open_feed: called once there is a client; its `TermgenError` says why there is none.
        found_notice: what is to be said once the server is found; empty for nothing."""
        super().__init__(*arguments, **options)
        self._open_feed = open_feed
        self._found_notice = found_notice
        self._feed: StreamFeed | None = None

    async def open_screens(self, report: Callable[[str, float], None]) -> None:
        report("connecting", 0.0)
        client = self.client = await self._start_engine(report)
        if notice := self._found_notice():
            self.warn_at_start(notice)
        self.add_mode("chat", lambda: self.make_chat(client))
        try:
            feed = self._feed = await self._open_feed()
        except TermgenError as error:
            self.add_dashboard(SilentScreen(str(error)))
            return
        self.add_dashboard(DashboardScreen(feed, now_ns=feed.now_ns, **self.dashboard_options))

    async def on_unmount(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()
