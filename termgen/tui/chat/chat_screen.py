"""The chat screen: it wires a chat's parts together, and binds keys and commands to them.

`Settings` and `QuestionFiles` (asking) say how the next question is asked, `Dialogue` asks it and
shows the answer, `AnswerTools` acts on answers, `SavedChats` keeps chats on disk. The screen itself
has the messages that wait to be sent, the focus, the footer and the status line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from textual import events, on
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Input, TextArea

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.tools.toolbox import Toolbox
from termgen.tui.chat.answer_tools import AnswerTools
from termgen.tui.chat.asking import QuestionFiles, Settings
from termgen.tui.chat.beside import Beside
from termgen.tui.chat.chat_keys import COMMAND_KEYS, COPY_KEYS, KEYS, TOOL_KEYS
from termgen.tui.chat.context_panel import short_meter
from termgen.tui.chat.dialogue import Dialogue
from termgen.tui.chat.panels import HistoryPanel
from termgen.tui.chat.prompts_panel import KeptPrompts
from termgen.tui.chat.saved import titles
from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.saved.chat_store import ChatStore, Resume
from termgen.tui.chat.saved_chats import SavedChats
from termgen.tui.chat.state import attachments as files
from termgen.tui.chat.state import commands
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.context_policy import POLICY_WORDS, ContextPolicy, short_cut_words
from termgen.tui.chat.state.conversation import AnswerState, Conversation, PromptHistory, Turn
from termgen.tui.chat.state.doubts import Doubts
from termgen.tui.chat.system_prompt import SystemPrompt
from termgen.tui.chat.titler import Titler
from termgen.tui.chat.view import ChatView
from termgen.tui.chat.widgets.chat_rows import ChatStatus, empty_rows, status_row
from termgen.tui.chat.widgets.completion import Arguments
from termgen.tui.chat.widgets.messages import (
    EntryClicked,
    LargePaste,
    ModelsWanted,
    PromptEdited,
    PromptSubmitted,
    QueueWanted,
    SessionWish,
)
from termgen.tui.chat.widgets.prompt import LARGE_PASTE_CHARS
from termgen.tui.chat.widgets.prompt_area import Waiting
from termgen.tui.chat.widgets.session_panel import SessionPanel
from termgen.tui.keys.key_bar import KeyBar
from termgen.tui.keys.keymap import brief_key_of, key_of
from termgen.tui.paint.canvas_screen import ThemedScreen
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, cut
from termgen.vocabulary.model_shelf import OtherModels

METER_SHARE = 0.5
"""Share of the context from which on the status line says what it holds."""
STOP_GRACE_S = 0.7
"""Seconds after the end of an answer in which esc is taken as meant for the answer."""


class ChatScreen(ThemedScreen):
    AUTO_FOCUS = "Prompt"
    BINDINGS = [*KEYS, *TOOL_KEYS, *COMMAND_KEYS, *COPY_KEYS]
    _ended_s = float("-inf")
    """Time at which the last answer ended."""

    def __init__(
        self,
        client: EngineClient,
        ui: UIConfig,
        *,
        chats: ChatStore | None = None,
        resume: Resume | None = None,
        toolbox: Toolbox | None = None,
        others: OtherModels | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._ui = ui
        self._offer = ""
        """Words on a better model, for the empty chat."""
        self._clock = clock
        store = chats or ChatStore()
        self.autosave = Autosave(store)
        self.panel = SessionPanel(wall_clock, id="sessions")
        self.view = view = ChatView(self, self._paint_status)
        self.transcript, self.area, self.prompt = view.transcript, view.area, view.prompt
        self.status = view.status
        self.settings = Settings(view, client, ui, on_change=self._settings_changed)
        self.files = QuestionFiles(view, lambda: self.settings.client)
        self.dialogue = Dialogue(
            view,
            self.settings,
            self.files,
            self.autosave,
            self._new_conversation(),
            toolbox=toolbox or Toolbox(),
            clock=clock,
            on_asked=self._asked,
            on_ended=self._answer_ended,
        )
        self.tools = AnswerTools(view, self.dialogue)
        self.system = SystemPrompt(view, self.dialogue)
        self.saved = SavedChats(
            view,
            self.settings,
            self.dialogue,
            self.panel,
            store,
            self.autosave,
            resume=resume,
            begin=self._new_conversation,
            show=self.show_conversation,
            on_opened=self._send_next,
        )
        self.titler = Titler(
            view, self.settings, self.dialogue, store, on_titled=self.saved.update_panel
        )
        self.beside = Beside(view, self.settings, self.dialogue, others, clock=clock)
        self.doubts = Doubts()
        self.kept_prompts = KeptPrompts(view, self.dialogue, self.doubts)
        self.command_table = self._handlers()

    def compose(self) -> ComposeResult:
        yield self.panel
        yield self.status
        yield self.transcript
        yield self.area
        yield KeyBar(self.keys_now)

    def on_mount(self) -> None:
        self.area.completion.arguments = self._arguments()
        self._show_when_empty()
        self.watch(self.transcript, "scroll_y", self.status.repaint, init=False)
        self.saved.start()
        self.dialogue.start()
        if self._ui.titles == titles.MODEL:
            self.titler.start()

    def on_unmount(self) -> None:
        self.autosave.flush()
        self.saved.save_draft()

    def apply_palette(self) -> None:
        super().apply_palette()
        self.transcript.set_palette(self.palette)

    @property
    def conversation(self) -> Conversation:
        return self.dialogue.conversation

    @property
    def is_streaming(self) -> bool:
        return self.dialogue.is_streaming

    def set_client(self, client: EngineClient, *, failure: str | None) -> None:
        """Answer with another model from here on. failure: why the wanted one was not loaded."""
        name = clean_line(client.model.model_id)
        self.settings.set_client(client)
        self.dialogue.tokens.clear()  # another model may have other tokens
        self.dialogue.fitting.forget_counts()
        self._show_when_empty()
        if failure is not None:
            self.view.note_fault(failure, hint=f"{name} answers as before.")
        elif self.conversation.turns:
            self.view.note(f"{name} answers from here on.")
        self.status.repaint()
        self.prompt.focus()

    def show_offer(self, words: str) -> None:
        """Words on a better model in the empty chat; none takes them back."""
        self._offer = words
        self._show_when_empty()

    def _show_when_empty(self) -> None:
        rows = partial(empty_rows, self.settings.client.model, self.view.key, offer=self._offer)
        self.transcript.set_empty(rows)

    def _new_conversation(self) -> Conversation:
        return self._empty(self._ui.system_prompt)

    def _empty(self, system_prompt: str | None) -> Conversation:
        conversation = Conversation(system_prompt=system_prompt)
        conversation.policy = ContextPolicy(self._ui.context_policy)
        return conversation

    def _settings_changed(self) -> None:
        self.dialogue.save_settings()
        self.status.repaint()

    @property
    def _hint(self) -> str:
        send, newline = (brief_key_of(self, f"prompt.{name}") for name in ("send", "newline"))
        return f"{send} send  {newline} new line  @ file  / commands"

    @on(PromptSubmitted)
    def _submitted(self, message: PromptSubmitted) -> None:
        parsed = commands.parse(message.text)
        if parsed is not None:
            self._accept(message.text)
            self.command_table[parsed[0].name](parsed[1])
        elif doubt := self.doubts.about(message.text):
            self.prompt.give_back(message.text)
            self.view.warn(f"{doubt}; {brief_key_of(self, 'prompt.send')} sends it as it is")
            self._show_hint()
        elif self.dialogue.editing is not None and self.is_streaming:
            self.prompt.give_back(message.text)
            self.dialogue.say_streaming()
        elif unread := self.files.unread(message.text):
            self.prompt.give_back(message.text)
            self.view.start_worker("files", self._read_and_send, unread, message.text)
        else:
            self._send(message.text)

    async def _read_and_send(self, documents: Sequence[str], text: str) -> None:
        """Send a question once its documents are read, unless it was changed meanwhile."""
        await self.files.read_documents(documents)
        if self.prompt.text == text:
            self.prompt.action_submit()

    def _send(self, text: str) -> None:
        attachments, beside = self.files.take(text), self.dialogue.editing
        if attachments is None:
            self.prompt.give_back(text)
            return
        self._accept(text)
        if beside is not None:
            self.dialogue.ask(text, attachments, beside=beside)
        else:
            self.area.put(Waiting(text, attachments))
            self._send_waiting()

    # -- messages that wait ----------------------------------------------------------------

    def _send_waiting(self) -> None:
        """Release waiting messages, and send the first if that is possible now."""
        self.area.hold(False)
        self._send_next()

    def _send_next(self) -> None:
        if self.is_streaming or self.saved.is_opening:
            return
        message = self.area.next()
        if message is not None:
            self.dialogue.ask(message.text, message.attachments)

    def _asked(self, turn: Turn) -> None:
        self.titler.note_use()
        self.saved.note_asked(turn)

    def _answer_ended(self, state: AnswerState) -> None:
        """Send the next message; after a stop or a failure hold it, as the user may not want it."""
        self._ended_s = time.monotonic()
        if state is AnswerState.DONE:
            self.call_later(self._send_next)
        else:
            self.area.hold()

    @on(QueueWanted)
    def _change_waiting(self, message: QueueWanted) -> None:
        if message.what == "take back":
            self.action_take_back()
        else:
            self._send_waiting()

    def action_take_back(self) -> None:
        message = self.area.take_back()
        if message is None:
            self.notify("no message waits to be sent")
            return
        attached = self.files.attached
        self.files.give_back(message.text, message.attachments)
        self.files.attach(files.merged([*attached, *self.files.attached]))
        self.prompt.focus()

    def inherit(
        self,
        text: str,
        waiting: Sequence[Waiting],
        pasted: Sequence[Attachment],
        history: PromptHistory,
    ) -> None:
        """Take over what was typed on the loading screen."""
        for earlier in reversed(history.newest_first()):
            self.prompt.prompts.add(earlier)
        if text:
            self.prompt.give_back(text)
        self.files.attach(files.merged([*self.files.attached, *pasted]))
        for message in waiting:
            attachments = self.files.read(message.text, message.attachments)
            if attachments is None:
                self.dialogue.quote_back(message.text)
            else:
                self.area.put(Waiting(message.text, attachments))
        self._send_next()

    def show_conversation(self, conversation: Conversation) -> None:
        """Show another chat. Attached files are dropped, waiting messages go to the history, the
        draft goes along to a new chat."""
        if not conversation.turns:
            self.autosave.drafted(self.conversation, "")
        self.dialogue.show(conversation)
        self.saved.update_panel()
        if self.saved.is_opening:
            return
        notes = []
        if self.files.attached:
            notes.append("attached files were for the chat before and are dropped")
            self.files.attach(())
        if dropped := self.area.drop_waiting():
            waited = "a message that waited is" if dropped == 1 else f"{dropped} messages are"
            notes.append(f"{waited} in the history: the up key brings them back")
        if notes:
            self.notify("; ".join(notes))

    # -- the focus -------------------------------------------------------------------------

    @property
    def is_browsing(self) -> bool:
        """True if single letters are commands."""
        return self.transcript.has_focus

    def begin_browsing(self) -> None:
        if self.conversation.turns:
            self.transcript.can_focus = True
            self.transcript.focus()

    def action_focus_prompt(self) -> None:
        self.prompt.focus()

    @on(events.DescendantFocus)
    def _keys_moved(self) -> None:
        self.transcript.can_focus = self.is_browsing
        self.prompt.set_class(self.is_browsing, "-browsing")
        self._show_hint()

    def on_resize(self) -> None:
        self.saved.fit_panel()

    def on_key(self, event: events.Key) -> None:
        """Type a letter that is no command here into a field: the search of the list of chats if
        that has the focus, else the prompt."""
        if not event.is_printable or not event.character:
            return
        if self.is_browsing and event.key in self.active_bindings:
            return
        event.stop()
        if self.panel.session_list.has_focus:
            self.panel.type(event.character)
        else:
            self.prompt.type(event.character)

    def note_key(self, key: str) -> None:
        """The user goes on: no title is written meanwhile, and the words of a search lose their
        marks. The key that stops takes these by itself, and does nothing else then."""
        self.titler.note_use()
        if self.transcript.has_marks:
            active = self.active_bindings.get(key)
            if active is None or active.binding.action != "stop":
                self.transcript.unmark()

    def on_paste(self, event: events.Paste) -> None:
        if isinstance(self.focused, TextArea | Input):
            return
        if self.panel.session_list.has_focus:
            self.panel.type(event.text)
        elif len(event.text) > LARGE_PASTE_CHARS:
            self.prompt.focus()
            self.post_message(LargePaste(event.text))
        else:
            self.prompt.type(event.text)

    def put_draft_away(self) -> bool:
        """Put the draft into the history; False without one."""
        if not self.prompt.put_away():
            return False
        self.dialogue.end_editing()
        return True

    def keys_now(self) -> tuple[str, list[tuple[str, str]]]:
        """The footer: a leading word, and the actions that have an effect now."""
        if self.is_browsing:
            keys = [("chat.mark_earlier", "Up"), ("chat.mark_later", "Down"), ("chat.copy", "Copy")]
            keys += [("chat.edit", "Edit"), ("chat.retry", "Retry"), ("chat.tokens", "Tokens")]
            keys += [("chat.write", "Type")]
            turn = self.dialogue.current
            if turn is not None and len(turn.siblings) > 1:
                keys[-1:-1] = [("chat.sibling_before", "Before"), ("chat.sibling_after", "After")]
            return "browse", keys
        if self.panel.display and self.panel.session_list.has_focus:
            keys = [("sessions.open", "Open"), ("sessions.rename", "Rename")]
            keys += [("sessions.pin", "Pin"), ("sessions.delete", "Delete")]
            keys += [("sessions.undo", "Undo")]
            return "chats", [*keys, ("chat.stop", "Close")]
        keys = []
        if self.is_streaming:
            keys = [("chat.stop", "Stop"), ("prompt.send", "Queue")]
        elif self.dialogue.editing is not None:
            keys = [("chat.stop", "Give up"), ("prompt.send", "Ask")]
        elif self.conversation.turns:
            keys = [("chat.stop", "Browse"), ("chat.retry", "Retry")]
        keys += [("chat.sessions", "Chats"), ("chat.engine", "Engine")]
        return "", [*keys, ("app.help", "Help"), ("app.palette", "Actions"), ("app.quit", "Quit")]

    def _accept(self, text: str) -> None:
        self.prompt.accept(text)
        self.dialogue.end_editing(typed=self.prompt.text)

    @on(PromptEdited)
    def _show_hint(self) -> None:
        """Show the present keys, or the command that is typed, on the prompt's lower edge."""
        if self.is_browsing:
            hint = f"letters are commands · {key_of(self, 'chat.write')} goes back to typing"
        else:
            parsed = commands.parse(self.prompt.text)
            hint = self._hint
            if self.prompt.text and self.prompt.text == self.doubts.asked:
                hint = f"{brief_key_of(self, 'prompt.send')} sends it as it is"
            if parsed is not None and parsed[0].argument:
                hint = f"/{parsed[0].name} {parsed[0].argument}  {parsed[0].help}"
        self.files.show_title()
        # Content, not markup: an argument may hold brackets
        self.prompt.border_subtitle = Content(cut(hint, max(8, self.prompt.size.width - 4)))

    def _arguments(self) -> dict[str, Arguments]:
        """Arguments of commands, for the list above the prompt."""

        def blocks() -> list[tuple[str, str]]:
            found = enumerate(self.tools.last_blocks(), 1)
            return [(str(n), f"{b.language} {b.code.split(chr(10))[0]}".strip()) for n, b in found]

        def chosen_themes() -> list[tuple[str, str]]:
            return [(name, "") for name in sorted(self.app.available_themes)]

        def off() -> list[tuple[str, str]]:
            return [("off", "what was set is removed")]

        named = dict.fromkeys(("system", "attach", "schema", "regex", "choice"), off)
        fits = [(policy.value, POLICY_WORDS[policy]) for policy in list(ContextPolicy)[1:]]
        fits.append(("off", "every turn is sent again"))
        return {
            **named,
            "fit": lambda: fits,
            "theme": chosen_themes,
            "code": blocks,
            "save": blocks,
            "tag": self.saved.tag_arguments,
            "beside": lambda: self.beside.names,
        }

    def action_stop(self) -> None:
        """One step back: leave the list of chats, else stop the answer, else give up an edit, else
        leave browse mode, else begin to browse. Just after the end of an answer nothing happens:
        the key was meant for the answer. Marked words of a search lose their marks."""
        was_marked = self.transcript.unmark()
        if self.saved.leave_panel():
            return
        if self.is_streaming:
            self.dialogue.stop_by_hand()
        elif self.dialogue.editing is not None:
            self.dialogue.end_editing()
        elif self.is_browsing or not self.prompt.has_focus:
            self.dialogue.mark(None)
            self.prompt.focus()
        elif not was_marked and time.monotonic() - self._ended_s > STOP_GRACE_S:
            self.begin_browsing()

    def action_clear(self) -> None:
        self.show_conversation(self._empty(self.conversation.system_prompt))
        self.prompt.focus()

    def action_new_chat(self) -> None:
        self.show_conversation(self._new_conversation())
        self.saved.close_narrow_panel()

    def action_fit(self) -> None:
        """Leave out the oldest turns, and send the message that did not fit again."""
        self.dialogue.fitting.fit("")
        if self.prompt.text.strip() and not self.is_streaming:
            self.prompt.action_submit()

    def action_context(self) -> None:
        self.dialogue.fitting.open_panel()

    def action_prompts(self) -> None:
        self.kept_prompts.run_command("")

    def action_fork(self) -> None:
        self.saved.fork()

    def action_begin_command(self, name: str) -> None:
        """Begin a command that needs an argument. The prompt's text goes to the history."""
        self.dialogue.end_editing()
        if self.prompt.text.strip():
            self.prompt.accept(self.prompt.text)
        self.prompt.set_text(f"/{name} ")
        self.prompt.focus()

    def action_scroll_transcript(self, pages: int) -> None:
        height = max(1, self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=pages * height, animate=False)

    def action_search_history(self) -> None:
        def use(text: str | None) -> None:
            if text is not None:
                self.prompt.set_text(text)
                self.prompt.focus()

        self.app.push_screen(HistoryPanel(self.prompt.prompts.newest_first()), use)

    # Actions of the parts: bindings name them on the screen.

    def action_retry(self) -> None:
        self.dialogue.regenerate()

    def action_edit(self) -> None:
        self.dialogue.edit()

    def action_tokens(self) -> None:
        self.dialogue.look_at_tokens()

    def action_sibling(self, by: int) -> None:
        self.dialogue.switch_sibling(by)

    def action_move_cursor(self, by: int) -> None:
        self.dialogue.move_cursor(by)

    def action_find(self) -> None:
        self.dialogue.find("")

    def action_tree(self) -> None:
        self.dialogue.open_tree("")

    def action_edit_system(self) -> None:
        self.system.open_panel()

    def action_sampling(self) -> None:
        self.settings.open_panel()

    def action_sessions(self) -> None:
        self.saved.toggle_panel()

    def action_copy_answer(self) -> None:
        self.tools.copy_answer()

    def action_list_tools(self) -> None:
        self.dialogue.tool_turns.run_command("")

    def action_fold_thoughts(self) -> None:
        self.tools.fold_thoughts()

    def action_tint_drafts(self) -> None:
        self.tools.tint_drafts(self.settings, "")

    def action_links(self) -> None:
        self.tools.list_links()

    def action_choose_block(self) -> None:
        self.tools.choose_block()

    def action_copy_block(self, number: int) -> None:
        self.tools.copy_block(number)

    @on(EntryClicked)
    def _entry_clicked(self, message: EntryClicked) -> None:
        self.tools.click(message)

    @on(LargePaste)
    def _pasted(self, message: LargePaste) -> None:
        self.files.add_pasted(message.text)

    @on(Input.Changed, "#session-search")
    def _search_changed(self) -> None:
        self.saved.search()

    @on(SessionWish)
    def _session_wished(self, message: SessionWish) -> None:
        self.saved.fulfil(message)

    # -- slash commands --------------------------------------------------------------------

    def _handlers(self) -> dict[str, Callable[[str], object]]:
        """The function that runs each slash command, given its argument; `state.commands` has their
        names and their help."""

        def alone(function: Callable[[], object]) -> Callable[[str], object]:
            return lambda _argument: function()

        def app(action: str) -> Callable[[str], object]:
            return lambda _argument: self.call_later(self.app.run_action, action)

        return {
            "clear": alone(self.action_clear),
            "new": alone(self.action_new_chat),
            "system": self.system.run_command,
            "copy": alone(self.tools.copy_answer),
            "code": self.tools.copy_command,
            "save": self.tools.save_command,
            "prompts": self.kept_prompts.run_command,
            "attach": self.files.run_command,
            "sampling": alone(self.settings.open_panel),
            "schema": partial(self.settings.set_form, "schema"),
            "regex": partial(self.settings.set_form, "regex"),
            "choice": partial(self.settings.set_form, "choice"),
            "fit": self.dialogue.fitting.fit,
            "compact": self._compact,
            "context": alone(self.dialogue.fitting.open_panel),
            "retry": alone(self.dialogue.regenerate),
            "beside": self.beside.run_command,
            "edit": alone(self.dialogue.edit),
            "find": self.dialogue.find,
            "tree": self.dialogue.open_tree,
            "tokens": alone(self.dialogue.look_at_tokens),
            "guessed": partial(self.tools.tint_drafts, self.settings),
            "links": alone(self.tools.list_links),
            "sessions": alone(self.saved.toggle_panel),
            "rename": self.saved.rename_open,
            "pin": alone(self.saved.pin_open),
            "tag": self.saved.tag_open,
            "fork": alone(self.saved.fork),
            "export": self.saved.export,
            "import": self.saved.import_chat,
            "mcp": self.dialogue.tool_turns.run_command,
            "model": lambda argument: self.post_message(ModelsWanted(argument)),
            "engine": app("app.show('dashboard')"),
            "theme": self._set_theme,
            "help": app("app.help"),
            "quit": app("app.quit"),
        }

    def _compact(self, focus: str) -> None:
        if self.is_streaming:
            self.dialogue.say_streaming()
        else:
            self.dialogue.fitting.compact(focus)

    def _set_theme(self, name: str) -> None:
        if not name:
            self.call_later(self.app.run_action, "app.change_theme")
        elif name in self.app.available_themes:
            self.app.theme = name
            self.view.keep_theme()
        else:
            names = ", ".join(n for n in self.app.available_themes if n.startswith("termgen"))
            self.view.note(f"No theme {clean_line(name)!r}. There are {names}, and Textual's own.")

    def _meter_words(self) -> str:
        """What the context holds, once it is half full or something is left out."""
        meter, is_cut = self.dialogue.fitting.meter, self.conversation.cut.num_left_out > 0
        if meter is None or not meter.limit or self.is_streaming:
            return ""
        return short_meter(meter) if is_cut or meter.share > METER_SHARE else ""

    def _paint_status(self, width: int, _height: int) -> Sequence[Row]:
        turns, left_out = self.conversation.turns, short_cut_words(self.conversation.cut)
        sent = (left_out,) if left_out else ()
        status = ChatStatus(
            stats=turns[-1].stats if turns else None,
            streaming=self.is_streaming,
            context_tokens=self.conversation.context_tokens,
            temperature=self.settings.params.temperature,
            changes=(*sent, *self.settings.changed_words()),
            now_s=self._clock(),
            behind=self.is_streaming and not self.transcript.at_end,
            meter=self._meter_words(),
        )
        return [status_row(self.settings.client.model, status, width)]
