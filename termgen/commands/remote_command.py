"""`termgen chat --url`: a chat with a remote server. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termgen.commands.launch import end_app
from termgen.commands.settings import SettingLayers, flag_of
from termgen.config import EngineConfig, UIConfig
from termgen.errors import ConfigError, EngineError
from termgen.system.choices import Choices, model_choice
from termgen.system.remembered import Remembered
from termgen.tools.toolbox import Toolbox
from termgen.vocabulary.model_shelf import ModelChoice, Switch

if TYPE_CHECKING:
    from termgen.client import EngineClient, ModelInfo
    from termgen.remote.client import RemoteClient
    from termgen.remote.models import RemoteModel
    from termgen.tui.feeds.feed import StreamFeed

KEY_VARIABLE = "OPENAI_API_KEY"
ADMIN_KEY_VARIABLE = "TERMGEN_ADMIN_KEY"


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """A server and one of its models; None: the first."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    wait_s: float | None = None
    """Longest wait for it; None: no limit while it loads, a moment if nothing answers."""


def read_target(
    url: str,
    api_key: str | None,
    layers: SettingLayers,
    *,
    wait_s: float | None = None,
    own: tuple[str, ...] = ("model",),
) -> RemoteTarget:
    """The target named by `--url` and its flags. Raises `ConfigError` for engine settings, which
    are the server's, except for `own`: those that the command sends with its requests."""
    for f in fields(EngineConfig):
        if f.name not in own and layers.given(f.name) is not None:
            raise ConfigError(
                f"{flag_of(f)} has no effect with --url: the server has an engine of its own",
                param=f.name,
            )
    key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE, "").strip() or None
    return RemoteTarget(url, key, layers.given("model"), wait_s)


def read_key(path: str | None) -> str | None:
    """The admin key from the file's first line, or from the environment; None without either."""
    if path is None:
        return os.environ.get(ADMIN_KEY_VARIABLE, "").split(",")[0].strip() or None
    try:
        lines = Path(path).read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-key-file {path}: {error}", param="admin_key_file") from error
    if not lines:
        raise ConfigError(f"--admin-key-file {path} is empty", param="admin_key_file")
    return lines[0]


class RemoteHolder:
    """The client of one chat, with the start and stop functions that screens take."""

    def __init__(
        self,
        target: RemoteTarget,
        *,
        given: Collection[str] | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        """given: sampling parameters to send, the server has its own for the others; None: all.
        remembered: has the model that was chosen last, which answers where the target names
        none."""
        from termgen.remote.models import normal_url

        self._url = normal_url(target.url)  # report a bad URL on the plain terminal
        self._target = target
        self._last = ""
        """The model chosen last, of which the server is still to say whether it has it."""
        if remembered is not None and target.model is None:
            self._last = Choices(remembered).text(model_choice(self._url))
        self.notice = ""
        """What is to be said after the start; empty for nothing."""
        self._model = target.model
        """The model that was chosen; None: the server's first."""
        self._given = given
        self._admin_key = read_key(None)
        self._client: RemoteClient | None = None
        self._described: ModelInfo | None = None
        """The model's description from the server's event stream."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line's words for the server, and for the model if one was chosen."""
        model = ("--model", self._model) if self._model is not None else ()
        return ("--url", self._target.url, *model)

    async def start(self, on_progress: Callable[[str, float], None]) -> EngineClient:
        from termgen.remote.client import RemoteClient

        target = self._target
        self._client = await RemoteClient.connect(
            target.url,
            api_key=target.api_key,
            admin_key=self._admin_key,
            model=target.model,
            report=on_progress,
            wait_s=target.wait_s,
        )
        self._client.given = self._given
        self._take_last(self._client)
        return self._client

    def _take_last(self, client: RemoteClient) -> None:
        """Use the model that was chosen last, if the server still has it."""
        last, self._last = self._last, ""
        if not last:
            return
        if any(model.model_id == last for model in client.models):
            client.use_model(last)
            self._model = last
        else:
            words = f"{last}, the model chosen last, is not on the server any more"
            self.notice = f"{words}; using {client.model.model_id}"

    async def stop(self) -> None:
        """Close the client. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def open_feed(self, hz: float) -> StreamFeed:
        """The server's event stream, if it is a termgen that permits it. Raises `TermgenError`.

        The admin key is sent to termgen servers only.
        """
        from termgen.remote.wire import Dialect
        from termgen.tui.feeds.attach import RemoteFeed

        client = self._running()
        if client.dialect is not Dialect.TERMGEN:
            raise EngineError(f"{client.url} is not a termgen server.")
        key = self._admin_key or self._target.api_key
        feed = await RemoteFeed.connect(client.url, hz=hz, key=key, past=True)
        self._described = feed.model
        client.learn(feed.model)
        return feed

    # The `ModelShelf` of the screen: the models of the server.

    async def choices(self) -> list[ModelChoice]:
        client = self._running()
        return [self._choice(model) for model in await client.refresh_models()]

    async def look_up(self, name: str) -> ModelChoice:
        found = next((model for model in self._running().models if model.model_id == name), None)
        if found is None:
            raise EngineError(f"the server has no {name!r}; the list shows what it has")
        return self._choice(found)

    @property
    def can_search(self) -> bool:
        return False

    async def search(self, words: str) -> list[ModelChoice]:
        raise EngineError("a server's models are its own: nothing is fetched for it")

    async def files(self, name: str) -> list[ModelChoice]:
        raise EngineError("a server's models are its own: nothing is fetched for it")

    async def remove(self, name: str) -> int:
        raise EngineError("a server's models are its own: they are not deleted from here")

    async def offer(self) -> ModelChoice | None:
        return None

    async def fetch(self, name: str, report: Callable[[str, float], None]) -> None:
        """Do nothing: a server has every model that it lists."""

    async def switch(self, name: str, report: Callable[[str, float], None]) -> Switch:
        client = self._running()
        client.use_model(name)
        self._model = name
        if self._described is not None:
            client.learn(self._described)
        return Switch(client, name=name, server=self._url)

    def _choice(self, model: RemoteModel) -> ModelChoice:
        length = f"{model.max_model_len:,} tokens of context" if model.max_model_len else ""
        detail = " · ".join(part for part in (model.owner, length) if part)
        is_current = model.model_id == self._running().model.model_id
        return ModelChoice(model.model_id, detail, is_current=is_current)

    def _running(self) -> RemoteClient:
        assert self._client is not None, "asked for after the start"
        return self._client


def run_remote_chat(
    target: RemoteTarget,
    ui: UIConfig,
    toolbox: Toolbox,
    *,
    session: str | None,
    given: Mapping[str, Any],
) -> int:
    """Chat until the user quits. `session` and `given` as for `run_chat`."""
    from termgen.remote.other_servers import OtherServers
    from termgen.tui.chat.saved.chat_store import chats_to_begin_with
    from termgen.tui.remote_app import RemoteApp

    RemoteApp.check_settings(ui)
    others = OtherServers(ui.beside, own_url=target.url, own_key=target.api_key)
    chats, resume = chats_to_begin_with(ui.chat_db, session, given)
    remembered = Remembered.of_user()
    holder = RemoteHolder(target, remembered=remembered)
    app = RemoteApp(
        holder.start,
        stop_engine=holder.stop,
        ui=ui,
        models=holder,
        chats=chats,
        resume=resume,
        toolbox=toolbox,
        found_by=lambda: holder.arguments,
        others=others,
        remembered=remembered,
        open_feed=lambda: holder.open_feed(ui.dashboard_hz),
        found_notice=lambda: holder.notice,
    )
    app.run()
    return end_app(app)
