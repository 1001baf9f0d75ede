"""`termgen chat`: the chat screen over an engine on this machine, which can change its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from termgen.commands.launch import EngineHolder, Progress, model_argument, run_app
from termgen.commands.shelf.local_shelf import LocalShelf
from termgen.config import EngineConfig, UIConfig
from termgen.errors import EngineError, ModelError, TermgenError
from termgen.library import catalog
from termgen.library.progress import TerminalProgress
from termgen.remote.other_servers import OtherServers
from termgen.system.choices import MODEL, Choices
from termgen.system.remembered import Remembered
from termgen.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from termgen.client import EngineClient


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
    others = OtherServers(ui.beside)
    chats, resume = chats_to_begin_with(ui.chat_db, session, given)
    remembered = Remembered.of_user()
    config, chosen, notice = with_last_model(config, remembered)
    with TerminalProgress() as progress:
        catalog.ensure_model(config.model, progress)
    holder = EngineHolder(config)

    async def start(on_progress: Progress) -> EngineClient:
        try:
            return await holder.start(on_progress)
        except TermgenError as error:
            if not chosen:
                raise
            words = "it is the model chosen last, and --model takes another"
            raise EngineError(f"{chosen} did not start: {error}; {words}") from error

    return run_app(
        start,
        holder.stop,
        ui,
        start_screen="chat",
        models=LocalShelf(holder),
        chats=chats,
        resume=resume,
        toolbox=toolbox,
        found_by=lambda: model_argument(holder.config),
        others=others,
        remembered=remembered,
        notices=(notice,),
    )


def with_last_model(config: EngineConfig, remembered: Remembered) -> tuple[EngineConfig, str, str]:
    """The config with the model that was chosen last in a chat, where no setting names one and that
    model is still here; its name; and what is to be said, if it is not."""
    chosen = Choices(remembered).text(MODEL)
    if not chosen or config.model is not None or config.tokenizer is not None:
        return config, "", ""
    try:
        catalog.resolve_model(chosen)
    except ModelError:
        name = catalog.DEFAULT_MODEL
        return config, "", f"{chosen}, the model chosen last, is not here any more; using {name}"
    return replace(config, model=chosen), chosen, ""
