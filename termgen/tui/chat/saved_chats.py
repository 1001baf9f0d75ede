"""Chats that are saved: the panel that lists them, opening, renaming, deleting, export and import.

Everything that reads the store is a worker: the screen never waits for a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from termgen.errors import ChatStoreError, RequestError
from termgen.system.choices import CHATS_COLUMNS, CHATS_OPEN
from termgen.tui.chat.asking import Settings
from termgen.tui.chat.dialogue import Dialogue
from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.saved.chat_db import SessionSummary
from termgen.tui.chat.saved.chat_records import (
    all_turns,
    as_json,
    as_markdown,
    conversation_of,
    fork_of,
    parse_export,
    read_chat,
    session_record,
    take_others,
    turn_record,
    user_path,
    write_new,
)
from termgen.tui.chat.saved.chat_store import ChatStore, Resume
from termgen.tui.chat.state.conversation import Conversation, Turn, title_of
from termgen.tui.chat.state.labels import labels_of, parse_tags, split_search, tag_words
from termgen.tui.chat.view import ChatView
from termgen.tui.chat.widgets.messages import SessionWish
from termgen.tui.chat.widgets.session_panel import COLUMNS_STEP, SessionList, SessionPanel
from termgen.tui.paint.sanitize import clean_line

SEARCH_PAUSE_S = 0.08
"""Pause in typing before the store is searched."""
DRAFT_EVERY_S = 1.0
"""What was typed in a shorter time is lost if the program is killed."""
EARLIER_QUESTIONS = 500
"""Questions of saved chats that the up key finds."""
OTHERS_S = 1.0
"""Interval of checks whether another window has written to the same chat."""


class SavedChats:
    def __init__(
        self,
        view: ChatView,
        settings: Settings,
        dialogue: Dialogue,
        panel: SessionPanel,
        store: ChatStore,
        autosave: Autosave,
        *,
        resume: Resume | None,
        begin: Callable[[], Conversation],
        show: Callable[[Conversation], None],
        on_opened: Callable[[], None],
    ) -> None:
        """begin: a new, empty conversation. show: puts a conversation on the screen. on_opened:
        called when the opening of a chat has ended."""
        self._view = view
        self._settings = settings
        self._dialogue = dialogue
        self._panel = panel
        self._store = store
        self._autosave = autosave
        self._resume = resume
        self._begin = begin
        self._show = show
        self._on_opened = on_opened
        self._deleted: list[SessionSummary] = []
        self._asked_here: set[str] = set()
        """Ids of the turns that this window has asked."""
        self._seen: tuple[str, int] | None = None
        """(session id, version of the file) of the last comparison with the file."""
        self._tags: dict[str, int] = {}
        """How many chats have each tag, when the list was last read."""
        self.is_opening = resume is not None
        """A resumed chat is still being read: questions wait for it."""

    def start(self) -> None:
        self._panel.display = self._view.keeps_chats_open
        self._store.start(report=self._report, replaced=self._save_again)
        if self._store.path is not None:
            self._view.screen.set_interval(OTHERS_S, self.look_for_others)
            self._view.screen.set_interval(DRAFT_EVERY_S, self.save_draft)
        self._view.start_worker("earlier-questions", self._reading_questions)
        if self._resume is not None:
            self.open(self._resume.session_id, resume=self._resume)
        self.update_panel()

    async def _reading_questions(self) -> None:
        """The up key finds the questions of other runs, too, and `/tag` their tags."""
        try:
            texts, self._tags = await self._store.read(
                lambda db: (db.recent_questions(EARLIER_QUESTIONS), db.tags())
            )
        except ChatStoreError as error:
            self._report(str(error))
        else:
            self._view.prompt.prompts.add_earlier(texts)

    def save_draft(self) -> None:
        """Keep what the prompt holds with the open chat."""
        if not self.is_opening:
            self._autosave.drafted(self._dialogue.conversation, self._dialogue.draft)

    def note_asked(self, turn: Turn) -> None:
        """Take in a turn that this window has asked."""
        self._asked_here.add(turn.turn_id)
        self.update_panel()

    # -- other windows ---------------------------------------------------------------------

    def look_for_others(self) -> None:
        self._view.start_worker("others", self._looking, exclusive=True)

    async def _looking(self) -> None:
        """Show what another window has written to the open chat: two windows on one chat would
        diverge unseen otherwise."""
        conversation = self._dialogue.conversation
        session_id = conversation.session_id
        if not conversation.turns or self.is_opening:
            return
        seen = self._seen
        try:
            seen = session_id, await self._store.read(lambda database: database.others_version)
            if seen == self._seen:
                return
            session, turns = await self._store.read(lambda database: database.load(session_id))
            if self._dialogue.conversation is not conversation:
                return
            self._seen = seen
            conversation.labels, conversation.title = labels_of(session.params), session.title
            cut = conversation.cut
            added, changed = take_others(conversation, turns, own=self._asked_here)
        except ChatStoreError as error:
            if self._seen is not None and self._seen[0] == session_id:
                self._report(f"another window: {error}; the next question keeps it here")
            self._seen = seen
            return
        if added or changed:
            self._dialogue.show_others(added, changed)
        if conversation.cut != cut:
            self._dialogue.fitting.say_cut()
            self._view.status.repaint()

    # -- the panel -------------------------------------------------------------------------

    def leave_panel(self) -> bool:
        """One step out of the panel; False if it does not have the focus."""
        panel = self._panel
        if panel.is_renaming:
            panel.end_rename()
        elif not panel.display or not panel.has_focus_within:
            return False
        elif panel.search.value:
            panel.search.value = ""
            panel.session_list.focus()
        else:
            self.toggle_panel()
        return True

    def close_narrow_panel(self) -> None:
        """Close the panel where it covers the chat; beside the chat it stays."""
        if self._view.is_narrow:
            self._panel.display = False
        self._view.prompt.focus()

    def _report(self, message: str) -> None:
        screen = self._view.screen
        screen.notify(message, severity="warning", timeout=12, markup=False)

    def _save_again(self) -> None:
        """Save the open chat into a new file."""
        self._autosave.save_all(
            self._dialogue.conversation, self._settings.params, own=self._settings.own
        )

    def toggle_panel(self) -> None:
        """Open the panel, or close it."""
        panel = self._panel
        panel.display = not panel.display
        if not self._view.is_narrow:
            self._view.remember(CHATS_OPEN, panel.display)
        if panel.display:
            panel.app.clear_notifications()  # which would cover the list
            panel.search.value = ""
            self.update_panel(select_open=True)
            panel.session_list.focus()
        else:
            self._view.prompt.focus()

    def fit_panel(self) -> None:
        """Give the panel the width that the user chose, where it is beside the chat."""
        self._panel.set_columns(0 if self._view.is_narrow else self._view.chats_columns)

    def _set_width(self, how: str) -> None:
        """Keep a new width of the panel. Where it covers the chat, it has none."""
        if self._view.is_narrow:
            return
        if how != "pulled":
            self._panel.change_columns(COLUMNS_STEP if how == "wider" else -COLUMNS_STEP)
        self._view.remember(CHATS_COLUMNS, self._panel.columns)

    def search(self) -> None:
        self.update_panel(pause_s=SEARCH_PAUSE_S)

    def update_panel(self, *, pause_s: float = 0.0, select_open: bool = False) -> None:
        """Bring the panel up to date, if it is open."""
        start = self._view.start_worker
        start("sessions", self._listing, pause_s, select_open, exclusive=True)

    async def _listing(self, pause_s: float, select_open: bool) -> None:
        if not self._panel.display:
            return
        await asyncio.sleep(pause_s)
        if not self._panel.query(SessionList):
            return  # the program has ended meanwhile
        words = self._panel.search.value.strip()
        try:
            found, self._tags = await self._store.read(
                lambda database: (database.sessions(words, pinned_first=True), database.tags())
            )
        except ChatStoreError as error:
            self._report(str(error))
            return
        if not self._panel.query(SessionList):
            return  # the program has ended meanwhile
        open_id = self._dialogue.conversation.session_id
        self._panel.session_list.show(found, words=words, open_id=open_id)
        if select_open:
            self._panel.session_list.select(open_id)

    def fulfil(self, message: SessionWish) -> None:
        """Do what a key or a click in the panel asks for."""
        session = message.session
        if message.what == "search":
            self._panel.search.focus()
        elif message.what == "undo":
            self._undo_delete()
        elif message.what in ("wider", "narrower", "pulled"):
            self._set_width(message.what)
        elif session is None:
            return
        elif message.what == "open":
            words = " ".join(split_search(self._panel.search.value)[1])
            self.close_narrow_panel()
            if session.session_id != self._dialogue.conversation.session_id:
                self.open(session.session_id, words=words)
            else:
                self._dialogue.go_to_words(words)
        elif message.what == "rename":
            self._panel.begin_rename(session)
        elif message.what == "pin":
            self._pin(session.session_id, not session.is_pinned)
        elif message.what == "name":
            self._rename(session.session_id, message.title)
        else:
            self._delete(session)

    def open(self, session_id: str, *, resume: Resume | None = None, words: str = "") -> None:
        """words: those that it was searched by; it opens where they are."""
        start = self._view.start_worker
        start("open-session", self._opening, session_id, resume, words, exclusive=True)

    async def _opening(self, session_id: str, resume: Resume | None, words: str) -> None:
        self.save_draft()
        try:
            session, turns = await self._store.read(lambda database: database.load(session_id))
            draft = await self._store.read(lambda database: database.draft(session_id))
            conversation = conversation_of(session, turns)
        except ChatStoreError as error:
            self._report(str(error))
        else:
            had_turns = bool(self._dialogue.conversation.turns)
            self.save_draft()
            self._show(conversation)
            self._autosave.opened(session_id, draft)
            self._show_draft(draft, had_turns=had_turns)
            self._settings.restore(session.params)
            if resume is not None:
                self._dialogue.restore_settings(resume.given)
            self.update_panel(select_open=True)
            self._view.status.repaint()
            self._dialogue.go_to_words(words)
        self.is_opening = False
        self._on_opened()

    def _show_draft(self, draft: str, *, had_turns: bool) -> None:
        """The prompt holds the draft of the chat that was opened. had_turns: the chat before has
        kept its own; else what was typed belongs to no chat, and stays."""
        prompt = self._view.prompt
        if had_turns:
            prompt.set_text(draft)
        elif draft and draft != prompt.text:
            prompt.set_text(f"{draft}\n{prompt.text}" if prompt.text.strip() else draft)

    def rename_open(self, title: str) -> None:
        if not self._dialogue.conversation.turns:
            self._view.warn("a chat has a name from its first question on")
        elif title:
            self._rename(self._dialogue.conversation.session_id, title)
        else:
            self._view.note(f"This chat is called: {self._dialogue.conversation.title}")

    def _rename(self, session_id: str, title: str) -> None:
        title = title_of(title)
        if session_id == self._dialogue.conversation.session_id:
            self._dialogue.conversation.title = title
        self._autosave.rename(session_id, title)
        self.update_panel()

    def pin_open(self) -> None:
        """`/pin`: keep the open chat at the top of the list, or no longer."""
        conversation = self._dialogue.conversation
        if not conversation.turns:
            self._view.warn("a chat can be pinned from its first question on")
            return
        is_pinned = not conversation.labels.is_pinned
        self._pin(conversation.session_id, is_pinned)
        top = "is at the top of the list of chats" if is_pinned else "is not pinned any more"
        self._view.note(f"This chat {top}.")

    def _pin(self, session_id: str, is_pinned: bool) -> None:
        conversation = self._dialogue.conversation
        if session_id == conversation.session_id:
            conversation.labels = replace(conversation.labels, is_pinned=is_pinned)
        self._autosave.pin(session_id, is_pinned)
        self.update_panel()

    def tag_open(self, argument: str) -> None:
        """`/tag NAME -NAME ...`: add and remove tags of the open chat; alone: list them."""
        conversation = self._dialogue.conversation
        try:
            add, remove = parse_tags(argument)
            labels = conversation.labels.with_tags(add, remove)
        except RequestError as error:
            self._view.refuse(error)
            return
        if not argument:
            self._view.start_worker("tags", self._say_tags)
        elif not conversation.turns:
            self._view.warn("a chat can have tags from its first question on")
        elif missing := set(remove) - set(conversation.labels.tags):
            self._view.warn(f"this chat has no tag {tag_words(sorted(missing))}")
        else:
            conversation.labels = labels
            self._autosave.tag(conversation.session_id, add, remove)
            self._tags |= {tag: self._tags.get(tag, 1) for tag in add}
            self._view.note(f"Tags of this chat: {tag_words(labels.tags) or 'none'}.")
            self.update_panel()

    async def _say_tags(self) -> None:
        try:
            self._tags = await self._store.read(lambda database: database.tags())
        except ChatStoreError as error:
            self._report(str(error))
            return
        own = tag_words(self._dialogue.conversation.labels.tags) or "none"
        every = ", ".join(f"{tag_words([tag])} {count}" for tag, count in self._tags.items())
        hint = "`/tag NAME` adds one, `/tag -NAME` removes it."
        self._view.note(f"Tags of this chat: {own}. Of all chats: {every or 'none'}.", hint=hint)

    def tag_arguments(self) -> list[tuple[str, str]]:
        """What may follow `/tag`: tags of other chats to add, the open one's to remove."""
        own = self._dialogue.conversation.labels.tags
        add = [(tag, f"{count} chats") for tag, count in self._tags.items() if tag not in own]
        return [*add, *((f"-{tag}", "remove it") for tag in own)]

    def _delete(self, session: SessionSummary) -> None:
        if session.session_id == self._dialogue.conversation.session_id:
            self._show(self._begin())
            self._panel.session_list.focus()
        self._deleted.append(session)
        self._autosave.delete(session.session_id)
        back = f"{self._view.key('sessions.undo')} brings it back"
        self._view.notify(f"deleted: {clean_line(session.title)} ({back})")
        self.update_panel()

    def _undo_delete(self) -> None:
        if not self._deleted:
            self._view.notify("nothing was deleted")
            return
        session = self._deleted.pop()
        self._autosave.restore(session.session_id)
        self.update_panel()

    # -- files -----------------------------------------------------------------------------

    def export(self, argument: str) -> None:
        """`/export [-f] [md|json] PATH`: write the path as markdown, or the whole tree as JSON."""
        self._view.start_worker("chat-files", self._exporting, argument)

    async def _exporting(self, argument: str) -> None:
        conversation, settings = self._dialogue.conversation, self._settings
        if not conversation.turns:
            self._view.warn("there is nothing to export yet")
            return
        try:
            wanted = parse_export(argument)
            session = session_record(conversation, settings.params, own=settings.own)
            if wanted.form == "md":
                text = as_markdown(session, conversation)
            else:
                turns = all_turns(conversation)
                text = as_json(session, [turn_record(conversation, turn) for turn in turns])
            replaced = await asyncio.to_thread(write_new, wanted, text)
        except ChatStoreError as error:
            self._view.refuse(error)
            return
        over = ", over the file that was there" if replaced else ""
        self._view.note(f"Exported to {wanted.path}{over}.")

    def fork(self) -> None:
        """`/fork`: go on in a new chat, which begins with the path up to the marked turn."""
        if self._dialogue.is_streaming:
            self._dialogue.say_streaming()
            return
        if self._dialogue.current is None:
            self._view.warn("there is nothing to go on from yet")
            return
        fork = fork_of(self._dialogue.conversation, self._dialogue.current)
        self._show(fork)
        self._autosave.save_all(fork, self._settings.params, own=self._settings.own)
        self.update_panel(select_open=True)
        which = "its question" if len(fork.turns) == 1 else f"{len(fork.turns)} questions"
        self._view.note(f"A new chat, with {which}. The one before is among the chats.")

    def import_chat(self, argument: str) -> None:
        """`/import PATH`: open a chat that was exported as JSON, as a new one."""
        self._view.start_worker("chat-files", self._importing, argument)

    async def _importing(self, argument: str) -> None:
        try:
            session, turns = await asyncio.to_thread(read_chat, user_path(argument))
        except ChatStoreError as error:
            self._view.refuse(error)
            return
        conversation = conversation_of(session, turns)
        self._settings.restore(session.params)
        self._show(conversation)
        self._autosave.save_all(conversation, self._settings.params, own=self._settings.own)
        self.update_panel(select_open=True)
