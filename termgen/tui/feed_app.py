"""An app that shows engines through their event streams: it has no engine of its own, and no chat.

`termgen top` and `termgen bench --watch` are made on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.system.remembered import Remembered
from termgen.tui.app import TermgenApp
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.fleet import FleetScreen, OpenFeed, ServerScreen
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.help import HelpScreen, HelpSection
from termgen.tui.themes.theme_chooser import ThemeChooser


class FeedApp(TermgenApp):
    """A feed, once there is one, takes the place of the engine."""

    slash_commands = ()
    interrupt_help: str
    """Effect of ctrl+c, for the help."""

    def __init__(
        self,
        *,
        ui: UIConfig,
        start_screen: str,
        theme_folders: tuple[Path, ...] | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        super().__init__(
            self._start_nothing,
            stop_engine=self._close_feed,
            ui=ui,
            start_screen=start_screen,
            theme_folders=theme_folders,
            remembered=remembered,
        )
        self._feed: StreamFeed | None = None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that lead to a chat do nothing, and the footer leaves them out."""
        if action == "show" and parameters == ("chat",):
            return False
        return super().check_action(action, parameters)

    @property
    def everywhere(self) -> list[BindingType]:
        return [
            replace(b, tooltip=self.interrupt_help)
            if isinstance(b, Binding) and b.id == "app.interrupt"
            else b
            for b in super().everywhere
        ]

    def help_of(self, sections: Iterable[HelpSection]) -> list[HelpSection]:
        """The help's sections with those of all screens, without keys that lead to a chat."""
        shown: list[HelpSection] = [
            (title, [b for b in bindings if not _leads_to_chat(b)]) for title, bindings in sections
        ]
        boxes = [*ThemeChooser.BINDINGS, *HelpScreen.BINDINGS]
        return [*shown, ("Everywhere", self.everywhere), ("Lists and notices", boxes)]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in super().get_system_commands(screen):
            if command.title != "Chat":
                yield command

    async def _start_nothing(self, _report: Callable[[str, float], None]) -> EngineClient:
        raise AssertionError("it has no engine of its own")

    async def _close_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()


def _leads_to_chat(binding: BindingType) -> bool:
    return isinstance(binding, Binding) and binding.action == "app.show('chat')"


class TopApp(FeedApp):
    interrupt_help = "Copy the selection; twice: quit"

    def __init__(
        self,
        open_feed: Callable[[], Awaitable[StreamFeed]],
        *,
        ui: UIConfig,
        theme_folders: tuple[Path, ...] | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        super().__init__(
            ui=ui, start_screen="dashboard", theme_folders=theme_folders, remembered=remembered
        )
        self._open_feed = open_feed
        self.report: Callable[[str, float], None] = lambda phase, progress: None
        """Shows on the loading screen how far `open_feed` is: a server may have to load first."""

    async def open_screens(self, report: Callable[[str, float], None]) -> None:
        report("connecting", 0.0)
        self.report = report
        feed = self._feed = await self._open_feed()
        self.add_dashboard(self.make_feed_dashboard(feed))

    def make_feed_dashboard(self, feed: StreamFeed) -> DashboardScreen:
        return DashboardScreen(feed, now_ns=feed.now_ns, is_alone=True, **self.dashboard_options)

    def help_sections(self) -> list[HelpSection]:
        return self.help_of([("Engine", DashboardScreen.BINDINGS)])


class FleetApp(FeedApp):
    """`termgen top` with several servers."""

    interrupt_help = "Copy the selection; twice: quit"

    def __init__(
        self,
        servers: Sequence[tuple[str, OpenFeed]],
        *,
        ui: UIConfig,
        theme_folders: tuple[Path, ...] | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        super().__init__(
            ui=ui, start_screen="dashboard", theme_folders=theme_folders, remembered=remembered
        )
        self.fleet = FleetScreen(servers, make_screen=self.make_server_screen)

    async def open_screens(self, report: Callable[[str, float], None]) -> None:
        self.fleet.follow()
        self.add_dashboard(self.fleet)

    def make_server_screen(self, feed: StreamFeed) -> ServerScreen:
        screen = ServerScreen(feed, now_ns=feed.now_ns, is_alone=True, **self.dashboard_options)
        screen.pages = self.pages_now
        return screen

    async def _close_feed(self) -> None:
        await self.fleet.close_feeds()

    def help_sections(self) -> list[HelpSection]:
        here: list[HelpSection] = [
            ("Servers", FleetScreen.BINDINGS),
            ("Engine", DashboardScreen.BINDINGS),
        ]
        if isinstance(self.screen, DashboardScreen):
            here.reverse()
        return self.help_of(here)
