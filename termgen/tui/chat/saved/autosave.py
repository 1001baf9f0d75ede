"""Says what of a conversation is to be saved, and when: its every change, and text as it streams.

The screen tells it what happens; the store does the work on its thread. A program that is killed
loses what came in the last `SAVE_EVERY_S`, or some seconds where tools gave long results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.saved.chat_records import all_turns, session_record, turn_record
from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.vocabulary.sampling_params import SamplingParams

SAVE_EVERY_S = 1.0
CHARS_PER_S = 500_000
"""A turn with long results of tools is saved less often: all of them are written again."""


class Autosave:
    def __init__(self, store: ChatStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._saved_s = 0.0
        self._unsaved: tuple[Conversation, Turn] | None = None
        """Whose text has grown since it was saved."""
        self._drafts: dict[str, str] = {}
        """Chat -> its draft as it was saved last, of the chats opened so far."""

    def asked(
        self,
        conversation: Conversation,
        turn: Turn,
        params: SamplingParams,
        *,
        own: SamplingParams | None = None,
    ) -> None:
        """A turn was added to the path. `own` is what `session_record` takes by this name."""
        self.save_session(conversation, params, own=own)
        if turn.parent is not None and turn.parent.cut is not None:
            self._save_turn(conversation, turn.parent)  # it may come from an older file's settings
        self._save_turn(conversation, turn)
        self.chose(conversation, turn)
        self._saved_s = self._clock()

    def changed(self, conversation: Conversation, turn: Turn) -> None:
        """Something of a turn that had ended is other than before."""
        self._save_turn(conversation, turn)

    def streamed(self, conversation: Conversation, turn: Turn) -> None:
        """Note that an answer's text has grown."""
        self._unsaved = conversation, turn
        wait_s = SAVE_EVERY_S + turn.num_result_chars / CHARS_PER_S
        if self._clock() - self._saved_s >= wait_s:
            self.flush()

    def ended(self, conversation: Conversation, turn: Turn) -> None:
        self._unsaved = conversation, turn
        self.flush()

    def flush(self) -> None:
        """Save the text that is not saved, without waiting for its second to end."""
        unsaved, self._unsaved = self._unsaved, None
        if unsaved is not None:
            self._save_turn(*unsaved)
            self._saved_s = self._clock()

    def opened(self, session_id: str, draft: str) -> None:
        """A chat was opened whose draft in the file is this."""
        self._drafts[session_id] = draft

    def drafted(self, conversation: Conversation, text: str) -> None:
        """Save what a chat's prompt holds, if that has changed here. A chat without a question is
        in no file, and neither is its draft."""
        session_id = conversation.session_id
        if not conversation.turns or self._drafts.get(session_id, "") == text:
            return
        self._drafts[session_id] = text
        self._put_about(session_id, "draft", lambda database: database.save_draft(session_id, text))

    def withdrew(self, conversation: Conversation, turn: Turn) -> None:
        """A turn is out of the tree; what took its place on the path is chosen already."""
        self._unsaved = None
        turn_id = turn.turn_id
        self._store.put(("turn", turn_id), lambda database: database.remove_turn(turn_id))
        now_chosen = turn.parent.chosen if turn.parent is not None else None
        if now_chosen is not None:
            self.chose(conversation, now_chosen)
        elif turn.parent is conversation.root:
            self.delete(conversation.session_id)

    def chose(self, conversation: Conversation, turn: Turn) -> None:
        """Save that a turn is now on the path instead of its siblings."""
        assert turn.parent is not None
        is_first = turn.parent is conversation.root
        parent_id = None if is_first else turn.parent.turn_id
        write = partial(
            ChatDatabase.choose,
            session_id=conversation.session_id,
            parent_id=parent_id,
            turn_id=turn.turn_id,
        )
        self._store.put(("chosen", parent_id or conversation.session_id), write)

    def save_session(
        self, conversation: Conversation, params: SamplingParams, *, own: SamplingParams | None
    ) -> None:
        session = session_record(conversation, params, own=own)
        self._put_about(
            session.session_id, "session", partial(ChatDatabase.save_session, session=session)
        )

    def save_all(
        self,
        conversation: Conversation,
        params: SamplingParams,
        *,
        own: SamplingParams | None = None,
    ) -> None:
        """Into a new file, or of an import."""
        turns = all_turns(conversation)
        session_id, labels = conversation.session_id, conversation.labels
        if turns:
            self.save_session(conversation, params, own=own)
        if turns and labels.is_pinned:
            self.pin(session_id, True)
        if turns:
            self.tag(session_id, labels.tags, ())
        for turn in turns:
            self._save_turn(conversation, turn)

    def rename(self, session_id: str, title: str) -> None:
        self._put_about(session_id, "title", lambda database: database.rename(session_id, title))

    def pin(self, session_id: str, is_pinned: bool) -> None:
        self._put_about(session_id, "pin", lambda database: database.pin(session_id, is_pinned))

    def tag(self, session_id: str, add: Iterable[str], remove: Iterable[str]) -> None:
        """Each tag by itself, so that a later change replaces only one of the same tag."""
        for tags, has_it in ((add, True), (remove, False)):
            for tag in tags:
                write = partial(ChatDatabase.tag, session_id=session_id, tag=tag, has_it=has_it)
                self._store.put(("tag", session_id, tag), write)

    def delete(self, session_id: str) -> None:
        self._put_about(session_id, "deleted", lambda database: database.delete(session_id))

    def restore(self, session_id: str) -> None:
        self._put_about(session_id, "deleted", lambda database: database.restore(session_id))

    def _save_turn(self, conversation: Conversation, turn: Turn) -> None:
        record = turn_record(conversation, turn)
        self._store.put(("turn", turn.turn_id), partial(ChatDatabase.save_turn, turn=record))

    def _put_about(self, session_id: str, what: str, write: Callable[[ChatDatabase], None]) -> None:
        self._store.put((what, session_id), write)
