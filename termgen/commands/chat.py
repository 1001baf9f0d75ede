"""`termgen chat`: the chat screen over an engine on this machine, which can change its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from termgen.commands.launch import EngineHolder, model_argument, run_app
from termgen.commands.shelf.local_shelf import LocalShelf
from termgen.config import EngineConfig, UIConfig
from termgen.library import catalog
from termgen.library.progress import TerminalProgress
from termgen.tools.toolbox import Toolbox


def run_chat(
    config: EngineConfig,
    ui: UIConfig,
    toolbox: Toolbox,
    *,
    session: str | None,
    given: Mapping[str, Any],
) -> int:
    """Run the chat screen. `session`: id or title of a chat to continue, "" for the last one.

    `given`: settings from the command line, which override those of the continued chat.
    """
    from termgen.tui.app import TermgenApp  # imports textual
    from termgen.tui.chat.saved.chat_store import chats_to_begin_with

    TermgenApp.check_settings(ui)
    chats, resume = chats_to_begin_with(ui.chat_db, session, given)
    with TerminalProgress() as progress:
        catalog.ensure_model(config.model, progress)
    holder = EngineHolder(config)
    return run_app(
        holder.start,
        holder.stop,
        ui,
        start_screen="chat",
        models=LocalShelf(holder),
        chats=chats,
        resume=resume,
        toolbox=toolbox,
        found_by=model_argument(config),
    )
