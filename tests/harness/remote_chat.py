"""A chat with a remote server, and what a user does in it."""

from __future__ import annotations

from typing import Any

from tui_harness import shipped_themes, wait_until

from termgen.commands.remote_command import RemoteHolder, RemoteTarget
from termgen.config import UIConfig
from termgen.system.remembered import Remembered
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.saved.chat_store import ChatStore, Resume
from termgen.tui.remote_app import RemoteApp


def remote_app(
    url: str,
    *,
    chats: ChatStore | None = None,
    resume: Resume | None = None,
    remembered: Remembered | None = None,
    **target: Any,
) -> RemoteApp:
    holder = RemoteHolder(RemoteTarget(url, **target), remembered=remembered)
    return RemoteApp(
        holder.start,
        stop_engine=holder.stop,
        ui=UIConfig(),
        models=holder,
        open_feed=lambda: holder.open_feed(20.0),
        theme_folders=(shipped_themes(),),
        chats=chats,
        resume=resume,
        remembered=remembered,
        found_notice=lambda: holder.notice,
    )


async def chat_of(app: RemoteApp, pilot: Any) -> ChatScreen:
    await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
    await pilot.pause()
    assert isinstance(app.screen, ChatScreen)
    return app.screen


async def ask(chat: ChatScreen, pilot: Any, text: str, *, wait: bool = True) -> None:
    chat.prompt.insert(text)
    await pilot.press("enter")
    if wait:
        await wait_until(pilot, lambda: not chat.is_streaming)
    await pilot.pause()
