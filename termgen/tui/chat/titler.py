"""Gives the open chat a title by the model, when neither the user nor the engine does anything.

The request is aborted by the next key and before each request of the user's own. Nothing is said
about a title that does not come: it was not asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from textual.worker import Worker, get_current_worker

from termgen.errors import TermgenError
from termgen.tui.chat.asking import Settings
from termgen.tui.chat.dialogue import Dialogue
from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.saved.titles import first_answered, is_by_words, read_title
from termgen.tui.chat.state.conversation import Conversation
from termgen.tui.chat.view import ChatView

IDLE_S = 4.0
"""Time without a key or an answer before a title is asked for."""
LOOK_S = 1.0
MOST_TRIES = 3
"""Requests for a chat: keys may abort them."""
OWN_ENGINE = {"enable_thinking": False}
"""Thoughts would take all of a title's tokens. Other servers may refuse what they do not know."""


class Titler:
    def __init__(
        self,
        view: ChatView,
        settings: Settings,
        dialogue: Dialogue,
        store: ChatStore,
        *,
        on_titled: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._settings = settings
        self._dialogue = dialogue
        self._store = store
        self._on_titled = on_titled
        self._clock = clock
        self._used_s = clock()
        self._worker: Worker[None] | None = None
        self._tries: dict[str, int] = {}
        """Requests that were begun for each chat."""
        self._request_ids = (f"title-{number}" for number in count(1))

    def start(self) -> None:
        self._view.screen.set_interval(LOOK_S, self.look)

    def note_use(self) -> None:
        """The user, or an answer, does something: wait anew. A request is aborted."""
        self._used_s = self._clock()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.cancel()

    def look(self) -> None:
        """Ask for a title, if it is time for one."""
        chat = self._dialogue.conversation
        if self._dialogue.is_streaming:
            self._used_s = self._clock()
        elif (
            self._worker is None
            and self._clock() - self._used_s >= IDLE_S
            and self._tries.get(chat.session_id, 0) < MOST_TRIES
            and is_by_words(chat)
            and first_answered(chat) is not None
        ):
            self._worker = self._view.start_worker("title", self._write, chat)

    async def _write(self, chat: Conversation) -> None:
        client, turn = self._settings.client, first_answered(chat)
        assert turn is not None, "looked for before"
        try:
            kwargs: dict[str, Any] = OWN_ENGINE
            try:
                state = await client.snapshot()
            except TermgenError:  # a server elsewhere: what it does is not known
                kwargs = {}
            else:
                if state.num_running + state.num_waiting:
                    return
            self._tries[chat.session_id] = self._tries.get(chat.session_id, 0) + 1
            title = await read_title(
                client, turn, request_id=next(self._request_ids), template_kwargs=kwargs
            )
            self._tries[chat.session_id] = MOST_TRIES  # another try would give the like
            if title:
                await self._keep(chat, title)
        except TermgenError:
            self._tries[chat.session_id] = MOST_TRIES
        finally:
            if self._worker is get_current_worker():
                self._worker = None

    async def _keep(self, chat: Conversation, title: str) -> None:
        before, session_id = chat.title, chat.session_id
        is_kept = await self._store.read(
            lambda database: database.retitle(session_id, before, title)
        )
        if is_kept:
            chat.title = title
            self._on_titled()
