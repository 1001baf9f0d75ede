"""`termgen chat --url`: a chat with a server elsewhere. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from termgen.config import EngineConfig, UIConfig
from termgen.errors import ConfigError, EngineError
from termgen.exit_codes import OK
from termgen.settings import SettingLayers, flag_of

if TYPE_CHECKING:
    from termgen.client import EngineClient
    from termgen.remote.client import RemoteClient
    from termgen.tui.feed import StreamFeed

KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """Which server, and which of its models; None: its first."""

    url: str
    api_key: str | None = None
    model: str | None = None


def read_target(url: str, api_key: str | None, layers: SettingLayers) -> RemoteTarget:
    """From the flags of `chat`. Raises `ConfigError` for what is the server's to decide."""
    for f in fields(EngineConfig):
        if f.name != "model" and layers.given(f.name) is not None:
            raise ConfigError(
                f"{flag_of(f)} has no effect with --url: the server has an engine of its own",
                param=f.name,
            )
    key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE, "").strip() or None
    return RemoteTarget(url, key, layers.given("model"))


class RemoteHolder:
    """The client of one chat, as the start and stop functions that the screens take."""

    def __init__(self, target: RemoteTarget) -> None:
        from termgen.remote.client import normal_url
        from termgen.top_command import read_key

        normal_url(target.url)  # what is wrong with it is said on the plain terminal
        self._target = target
        self._admin_key = read_key(None)
        self._client: RemoteClient | None = None

    async def start(self, on_progress: Callable[[str, float], None]) -> EngineClient:
        from termgen.remote.client import RemoteClient

        target = self._target
        self._client = await RemoteClient.connect(
            target.url, api_key=target.api_key, admin_key=self._admin_key, model=target.model
        )
        return self._client

    async def stop(self) -> None:
        """May be called again."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def open_feed(self, hz: float) -> StreamFeed:
        """What the engine does, where the server is a termgen that shows it. Raises `TermgenError`.

        The keys of this person's own servers are for these only.
        """
        from termgen.remote.wire import Dialect
        from termgen.tui.attach import RemoteFeed

        client = self._client
        assert client is not None, "asked for after the start"
        if client.dialect is not Dialect.TERMGEN:
            raise EngineError(f"{client.url} is not a termgen server.")
        key = self._admin_key or self._target.api_key
        feed = await RemoteFeed.connect(client.url, hz=hz, key=key)
        client.learn(feed.model)
        return feed


def run_remote_chat(target: RemoteTarget, ui: UIConfig) -> int:
    """Until the person quits."""
    from termgen.tui import themes
    from termgen.tui.remote_app import RemoteApp

    themes.check_name(ui.theme, themes.shipped_folder(), themes.user_folder())
    holder = RemoteHolder(target)
    app = RemoteApp(
        holder.start,
        stop_engine=holder.stop,
        ui=ui,
        open_feed=lambda: holder.open_feed(ui.dashboard_hz),
    )
    app.run()
    return app.return_code or OK
