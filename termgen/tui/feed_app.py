"""Apps without an engine or a chat of their own: a feed of events takes the place of the engine.

`termgen top` and `termgen bench --watch` are made on top of this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from textual.app import SystemCommand
from textual.screen import Screen

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.tui.app import TermgenApp
from termgen.tui.feed import StreamFeed


class FeedApp(TermgenApp):
    def __init__(
        self,
        open_feed: Callable[[], Awaitable[StreamFeed]],
        *,
        ui: UIConfig,
        start_screen: str,
        theme_folders: tuple[Path, ...] | None = None,
    ) -> None:
        super().__init__(
            self._start_nothing,
            stop_engine=self._close_feed,
            ui=ui,
            start_screen=start_screen,
            theme_folders=theme_folders,
        )
        self._open_feed = open_feed
        self._feed: StreamFeed | None = None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that lead to a chat do nothing, and the footer leaves them out."""
        if action == "show" and parameters == ("chat",):
            return False
        return super().check_action(action, parameters)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in super().get_system_commands(screen):
            if command.title != "Chat":
                yield command

    async def _start_nothing(self, _report: Callable[[str, float], None]) -> EngineClient:
        raise AssertionError("`open_screens` starts no engine here")

    async def _close_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()
