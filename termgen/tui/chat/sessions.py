"""Chats that are kept: the panel that lists them, opening, renaming, deleting, exports and imports.

Between the conversation on screen and the chat screen. Everything that reads the store is a worker:
the screen never waits for a disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from textual import getters, on, work
from textual.widgets import Input

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.errors import ChatStoreError
from termgen.tui.chat.dialogue import DialogueScreen
from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.saved.chat_db import SessionSummary
from termgen.tui.chat.saved.chat_records import (
    all_turns,
    as_json,
    as_markdown,
    conversation_of,
    parse_export,
    read_chat,
    restored_params,
    session_record,
    take_others,
    turn_record,
    user_path,
    write_new,
)
from termgen.tui.chat.saved.chat_store import ChatStore, Resume
from termgen.tui.chat.state.answer_branch import Branch
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.conversation import Conversation, Turn, title_of
from termgen.tui.chat.widgets.entries import AnswerEntry, NoticeEntry, QuestionEntry
from termgen.tui.chat.widgets.messages import SessionWish
from termgen.tui.chat.widgets.session_panel import SessionList, SessionPanel
from termgen.tui.keys.keymap import key_of
from termgen.tui.paint.sanitize import clean_line

SEARCH_PAUSE_S = 0.08
"""Typing goes on for so long before the store is asked."""
OTHERS_S = 1.0
"""How often to see whether another window has written to the same chat."""


class SessionScreen(DialogueScreen):
    panel = getters.query_one(SessionPanel)

    def __init__(
        self,
        client: EngineClient,
        ui: UIConfig,
        *,
        chats: ChatStore | None = None,
        resume: Resume | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._chats = chats or ChatStore()
        super().__init__(client, ui, autosave=Autosave(self._chats), clock=clock)
        self._resume = resume
        self._wall_clock = wall_clock
        self._deleted: list[SessionSummary] = []
        self._asked_here: set[str] = set()
        """Ids of the turns that are this window's own."""
        self._seen: tuple[str, int] | None = None
        """Which chat was last compared with the file, and which state of the file."""
        self.is_opening = resume is not None
        """The chat to go on with is being read: questions wait for it."""

    def on_mount(self) -> None:
        self.panel.display = False
        self._chats.start(report=self._report, replaced=self._save_again)
        if self._chats.path is not None:
            self.set_interval(OTHERS_S, self.look_for_others)
        if self._resume is not None:
            self.open_session(self._resume.session_id, resume=self._resume)

    def on_unmount(self) -> None:
        self.autosave.flush()

    def ask(
        self,
        question: str,
        attachments: tuple[Attachment, ...] = (),
        *,
        beside: Turn | None = None,
        branch: Branch | None = None,
    ) -> None:
        super().ask(question, attachments, beside=beside, branch=branch)
        self._asked_here.add(self.conversation.turns[-1].turn_id)
        self.list_sessions()

    def set_conversation(self, conversation: Conversation) -> None:
        super().set_conversation(conversation)
        self.list_sessions()

    @work(exclusive=True, group="others")
    async def look_for_others(self) -> None:
        """Take in what another window has written to the chat that is open here, and say so: two
        windows on one chat would part unseen otherwise."""
        conversation = self.conversation
        session_id = conversation.session_id
        if not conversation.turns or self.is_opening:
            return
        seen = self._seen
        try:
            seen = session_id, await self._chats.read(lambda database: database.others_version)
            if seen == self._seen:
                return
            _, turns = await self._chats.read(lambda database: database.load(session_id))
            if self.conversation is not conversation:
                return
            self._seen = seen
            added, changed = take_others(conversation, turns, own=self._asked_here)
        except ChatStoreError as error:
            if self._seen is not None and self._seen[0] == session_id:
                self._report(f"another window: {error}; the next question keeps it here")
            self._seen = seen
            return
        if added or changed:
            self._show_others(added, changed)

    def _show_others(self, added: Sequence[Turn], changed: Sequence[Turn]) -> None:
        swapped: dict[object, QuestionEntry | AnswerEntry] = {}
        for turn in changed:
            if turn in self._entries:
                old, fresh = self._entries[turn], self._make_entries(turn)
                self._entries[turn] = fresh
                swapped |= {old[0]: fresh[0], old[1]: fresh[1]}
        entries = self.transcript.entries
        self.transcript.set_entries([swapped.get(entry, entry) for entry in entries])
        self.show_path()
        path = self.conversation.turns
        gone_on = [turn for turn in added if turn in path]
        if gone_on:
            number = "a turn" if len(gone_on) == 1 else f"{len(gone_on)} turns"
            self._say_above(gone_on[0], f"Another window has gone on with this chat: {number}.")
            self.transcript.to_end()
        for turn in added:
            beside = [sibling for sibling in turn.siblings if sibling in path]
            if turn in path or not beside:
                continue
            self.transcript.update(self._entries[beside[0]][1])
            keys = f"{key_of(self, 'chat.sibling_before')} {key_of(self, 'chat.sibling_after')}"
            question = clean_line(title_of(turn.question))
            words = f"Another window has asked at the same place: {question!r}."
            hint = f"It is a branch beside what is shown here: {keys}, or click ‹1/2›."
            self.transcript.add(NoticeEntry(words, hint=hint))
        self.refresh_bindings()

    def leave_panel(self) -> bool:
        """One step out of the panel; False if the keys are not there."""
        panel = self.panel
        if panel.is_renaming:
            panel.end_rename()
        elif not panel.display or not panel.has_focus_within:
            return False
        elif panel.search.value:
            panel.search.value = ""
            panel.session_list.focus()
        else:
            self.action_sessions()
        return True

    def close_narrow_panel(self) -> None:
        """Where it covers the chat; beside it, it may stay."""
        if self.has_class("-narrow"):
            self.panel.display = False
        self.prompt.focus()

    def _report(self, message: str) -> None:
        self.notify(message, severity="warning", timeout=12, markup=False)

    def _save_again(self) -> None:
        """The file is a new one."""
        self.autosave.save_all(self.conversation, self._params, own=self._own_params)

    def action_sessions(self) -> None:
        """Open the panel, or close it."""
        panel = self.panel
        panel.display = not panel.display
        if panel.display:
            panel.search.value = ""
            self.list_sessions(select_open=True)
            panel.session_list.focus()
        else:
            self.prompt.focus()

    @work(exclusive=True, group="sessions")
    async def list_sessions(self, *, pause_s: float = 0.0, select_open: bool = False) -> None:
        """Bring the panel up to date, if it is open."""
        if not self.panel.display:
            return
        await asyncio.sleep(pause_s)
        words = self.panel.search.value.strip()
        try:
            found = await self._chats.read(lambda database: database.sessions(words))
        except ChatStoreError as error:
            self._report(str(error))
            return
        if not self.panel.query(SessionList):
            return  # the program has ended meanwhile
        open_id = self.conversation.session_id
        self.panel.session_list.show(found, words=words, open_id=open_id)
        if select_open:
            self.panel.session_list.select(open_id)

    @on(Input.Changed, "#session-search")
    def _search(self) -> None:
        self.list_sessions(pause_s=SEARCH_PAUSE_S)

    @on(SessionWish)
    def _fulfil(self, message: SessionWish) -> None:
        session = message.session
        if message.what == "search":
            self.panel.search.focus()
        elif message.what == "undo":
            self._undo_delete()
        elif session is None:
            return
        elif message.what == "open":
            self.close_narrow_panel()
            if session.session_id != self.conversation.session_id:
                self.open_session(session.session_id)
        elif message.what == "rename":
            self.panel.begin_rename(session)
        elif message.what == "name":
            self._rename(session.session_id, message.title)
        else:
            self._delete(session)

    @work(exclusive=True, group="open-session")
    async def open_session(self, session_id: str, *, resume: Resume | None = None) -> None:
        try:
            session, turns = await self._chats.read(lambda database: database.load(session_id))
            conversation = conversation_of(session, turns)
        except ChatStoreError as error:
            self._report(str(error))
        else:
            self.set_conversation(conversation)
            self.restore_params(session.params)
            if resume is not None:
                self._apply_given(resume)
            self.list_sessions(select_open=True)
            self.status.repaint()
        self.is_opening = False
        self.session_opened()

    def session_opened(self) -> None:
        """For what waits for it."""

    def _apply_given(self, resume: Resume) -> None:
        given = dict(resume.given)
        if "system_prompt" in given:
            self.conversation.system_prompt = given["system_prompt"]
        self._params = restored_params(given, self._params)

    def rename_open(self, title: str) -> None:
        if not self.conversation.turns:
            self.notify("a chat has a name from its first question on", severity="warning")
        elif title:
            self._rename(self.conversation.session_id, title)
        else:
            self.transcript.add(NoticeEntry(f"This chat is called: {self.conversation.title}"))

    def _rename(self, session_id: str, title: str) -> None:
        title = title_of(title)
        if session_id == self.conversation.session_id:
            self.conversation.title = title
        self.autosave.rename(session_id, title)
        self.list_sessions()

    def _delete(self, session: SessionSummary) -> None:
        if session.session_id == self.conversation.session_id:
            self.set_conversation(Conversation(system_prompt=self._ui.system_prompt))
            self.panel.session_list.focus()
        self._deleted.append(session)
        self.autosave.delete(session.session_id)
        back = f"{key_of(self, 'sessions.undo')} brings it back"
        self.notify(f"deleted: {clean_line(session.title)} ({back})", markup=False)
        self.list_sessions()

    def _undo_delete(self) -> None:
        if not self._deleted:
            self.notify("nothing was deleted")
            return
        session = self._deleted.pop()
        self.autosave.restore(session.session_id)
        self.list_sessions()

    @work(group="chat-files")
    async def export(self, argument: str) -> None:
        """`/export [-f] [md|json] PATH`: the path as markdown, or the whole tree as JSON."""
        if not self.conversation.turns:
            self.notify("there is nothing to export yet", severity="warning")
            return
        try:
            wanted = parse_export(argument)
            session = session_record(self.conversation, self._params, own=self._own_params)
            if wanted.form == "md":
                text = as_markdown(session, self.conversation)
            else:
                turns = all_turns(self.conversation)
                text = as_json(session, [turn_record(self.conversation, turn) for turn in turns])
            replaced = await asyncio.to_thread(write_new, wanted, text)
        except ChatStoreError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        over = ", over the file that was there" if replaced else ""
        self.transcript.add(NoticeEntry(f"Exported to {wanted.path}{over}."))

    @work(group="chat-files")
    async def import_chat(self, argument: str) -> None:
        """`/import PATH`: a chat that was exported as JSON, as a new one."""
        try:
            session, turns = await asyncio.to_thread(read_chat, user_path(argument))
        except ChatStoreError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        conversation = conversation_of(session, turns)
        self.restore_params(session.params)
        self.set_conversation(conversation)
        self.autosave.save_all(conversation, self._params, own=self._own_params)
        self.list_sessions(select_open=True)
