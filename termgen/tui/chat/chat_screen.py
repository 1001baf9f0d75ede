"""The chat screen: keys, commands and status line around the conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from textual import events, on
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Input, TextArea

from termgen.client import EngineClient
from termgen.tui.chat.chat_keys import COMMAND_KEYS, COPY_KEYS, KEYS, TOOL_KEYS
from termgen.tui.chat.sessions import SessionScreen
from termgen.tui.chat.state import attachments as files
from termgen.tui.chat.state import commands
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.conversation import AnswerState, Conversation, PromptHistory
from termgen.tui.chat.widgets.chat_rows import ChatStatus, empty_rows, status_row
from termgen.tui.chat.widgets.completion import Arguments
from termgen.tui.chat.widgets.entries import NoticeEntry
from termgen.tui.chat.widgets.messages import (
    LargePaste,
    ModelsWanted,
    PromptEdited,
    PromptSubmitted,
    QueueWanted,
)
from termgen.tui.chat.widgets.prompt import LARGE_PASTE_CHARS
from termgen.tui.chat.widgets.prompt_area import PromptArea, Waiting
from termgen.tui.chat.widgets.session_panel import SessionPanel
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.keys.key_bar import KeyBar
from termgen.tui.keys.keymap import brief_key_of, key_of
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, cut

STOP_GRACE_S = 0.7
"""For so long after an answer, esc was meant to stop it."""


class ChatScreen(SessionScreen):
    AUTO_FOCUS = "Prompt"
    BINDINGS = [*KEYS, *TOOL_KEYS, *COMMAND_KEYS, *COPY_KEYS]
    _ended_s = float("-inf")
    """When an answer ended."""

    def compose(self) -> ComposeResult:
        yield SessionPanel(self._wall_clock, id="sessions")
        self.status = Canvas(self._paint_status, id="status")
        yield self.status
        self.transcript = Transcript(id="transcript")
        yield self.transcript
        self.area = PromptArea(until="when the answer ends", id="prompt-area")
        self.prompt = self.area.prompt
        yield self.area
        yield KeyBar(self.keys_now)

    def on_mount(self) -> None:
        self.area.completion.arguments = self._arguments()
        self._show_when_empty()
        self.watch(self.transcript, "scroll_y", self.status.repaint, init=False)

    def set_client(self, client: EngineClient, *, failure: str | None) -> None:
        """Another model answers from here on; `failure` says why it is not the one asked for."""
        self._client, model = client, client.model
        self.tokens.clear()  # its tokens may be others
        self._show_when_empty()
        self.use_defaults()
        if failure is not None:
            hint = f"{clean_line(model.model_id)} answers as before."
            self.transcript.add(NoticeEntry(failure, role="bad", sign="✗", hint=hint))
        elif self.conversation.turns:
            self.note(f"{clean_line(model.model_id)} answers from here on.")
        self.status.repaint()
        self.prompt.focus()

    def _show_when_empty(self) -> None:
        self.transcript.set_empty(partial(empty_rows, self._client.model, partial(key_of, self)))

    @property
    def _hint(self) -> str:
        send, newline = (brief_key_of(self, f"prompt.{name}") for name in ("send", "newline"))
        return f"{send} send  {newline} new line  @ file  / commands"

    @on(PromptSubmitted)
    def _submitted(self, message: PromptSubmitted) -> None:
        parsed = commands.parse(message.text)
        if parsed is not None:
            self._accept(message.text)
            self._run_command(parsed[0].name, parsed[1])
        elif commands.looks_like_command(message.text):
            self.prompt.give_back(message.text)
            which = f"no command {message.text.strip()}"
            self.notify(f"{which}; {key_of(self, 'app.help')} lists them", severity="warning")
        elif self.editing is not None and self.is_streaming:
            self.prompt.give_back(message.text)
            self.say_streaming()
        else:
            attachments, beside = self.take_files(message.text), self.editing
            if attachments is None:
                self.prompt.give_back(message.text)
                return
            self._accept(message.text)
            if beside is not None:
                self.ask(message.text, attachments, beside=beside)
            else:
                self.area.put(Waiting(message.text, attachments))
                self._send_waiting()

    # messages that wait

    def _send_waiting(self) -> None:
        """The first of them, if it can be sent now."""
        self.area.hold(False)
        self._send_next()

    def _send_next(self) -> None:
        if self.is_streaming or self.is_opening:
            return
        message = self.area.next()
        if message is not None:
            self.ask(message.text, message.attachments)

    def answer_ended(self, state: AnswerState) -> None:
        """After a stop or a failure nothing is sent that the user may not want any more."""
        self._ended_s = time.monotonic()
        if state is AnswerState.DONE:
            self.call_later(self._send_next)
        else:
            self.area.hold()

    def session_opened(self) -> None:
        self._send_next()

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
        attached = self.attached
        self.give_back(message.text, message.attachments)
        self.attach(files.merged([*attached, *self.attached]))
        self.prompt.focus()

    def inherit(
        self,
        text: str,
        waiting: Sequence[Waiting],
        pasted: Sequence[Attachment],
        history: PromptHistory,
    ) -> None:
        """What was typed while the model was loaded."""
        for earlier in reversed(history.newest_first()):
            self.prompt.prompts.add(earlier)
        if text:
            self.prompt.give_back(text)
        self.attach(files.merged([*self.attached, *pasted]))
        for message in waiting:
            attachments = self.files_for(message.text, message.attachments)
            if attachments is None:
                self.quote_back(message.text)
            else:
                self.area.put(Waiting(message.text, attachments))
        self._send_next()

    def set_conversation(self, conversation: Conversation) -> None:
        """What was meant for the chat before does not go along: files are dropped, and messages
        that wait are in the history. The draft stays."""
        super().set_conversation(conversation)
        if self.is_opening:
            return
        notes = []
        if self.attached:
            notes.append("attached files were for the chat before and are dropped")
            self.attach(())
        if dropped := self.area.drop_waiting():
            waited = "a message that waited is" if dropped == 1 else f"{dropped} messages are"
            notes.append(f"{waited} in the history: the up key brings them back")
        if notes:
            self.notify("; ".join(notes))

    # where the keys are

    @property
    def is_browsing(self) -> bool:
        """Single letters are commands."""
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

    def on_key(self, event: events.Key) -> None:
        """A letter that is no command where the keys are belongs to a field: to the search of the
        list of chats if they are there, else to the prompt."""
        if not event.is_printable or not event.character:
            return
        if self.is_browsing and event.key in self.active_bindings:
            return
        event.stop()
        if self.panel.session_list.has_focus:
            self.panel.type(event.character)
        else:
            self.prompt.type(event.character)

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
        """The draft goes into the history; False without one."""
        if not self.prompt.put_away():
            return False
        self.end_editing()
        return True

    def keys_now(self) -> tuple[str, list[tuple[str, str]]]:
        """For the footer: a word in front, and the actions that do something now."""
        if self.is_browsing:
            keys = [("chat.mark_earlier", "Up"), ("chat.mark_later", "Down"), ("chat.copy", "Copy")]
            keys += [("chat.edit", "Edit"), ("chat.retry", "Retry"), ("chat.tokens", "Tokens")]
            keys += [("chat.write", "Type")]
            turn = self.cursor_turn
            if turn is not None and len(turn.siblings) > 1:
                keys[-1:-1] = [("chat.sibling_before", "Before"), ("chat.sibling_after", "After")]
            return "browse", keys
        if self.panel.display and self.panel.session_list.has_focus:
            keys = [("sessions.open", "Open"), ("sessions.rename", "Rename")]
            keys += [("sessions.delete", "Delete"), ("sessions.undo", "Undo")]
            return "chats", [*keys, ("chat.stop", "Close")]
        keys = []
        if self.is_streaming:
            keys = [("chat.stop", "Stop"), ("prompt.send", "Queue")]
        elif self.editing is not None:
            keys = [("chat.stop", "Give up"), ("prompt.send", "Ask")]
        elif self.conversation.turns:
            keys = [("chat.stop", "Browse"), ("chat.retry", "Retry")]
        keys += [("chat.sessions", "Chats"), ("chat.engine", "Engine")]
        return "", [*keys, ("app.help", "Help"), ("app.palette", "Actions"), ("app.quit", "Quit")]

    def _accept(self, text: str) -> None:
        self.prompt.accept(text)
        self.end_editing(typed=self.prompt.text)

    @on(PromptEdited)
    def _show_hint(self) -> None:
        """What can be done now, on the prompt's lower edge."""
        if self.is_browsing:
            hint = f"letters are commands · {key_of(self, 'chat.write')} goes back to typing"
        else:
            parsed = commands.parse(self.prompt.text)
            hint = self._hint
            if parsed is not None and parsed[0].argument:
                hint = f"/{parsed[0].name} {parsed[0].argument}  {parsed[0].help}"
        self.label_prompt(self._label)
        # Content, not markup: an argument may hold brackets
        self.prompt.border_subtitle = Content(cut(hint, max(8, self.prompt.size.width - 4)))

    def _arguments(self) -> dict[str, Arguments]:
        """What commands can be given, for the list above the prompt."""

        def blocks() -> list[tuple[str, str]]:
            found = enumerate(self.last_blocks(), 1)
            return [(str(n), f"{b.language} {b.code.split(chr(10))[0]}".strip()) for n, b in found]

        def chosen_themes() -> list[tuple[str, str]]:
            return [(name, "") for name in sorted(self.app.available_themes)]

        def off() -> list[tuple[str, str]]:
            return [("off", "what was set is removed")]

        named = dict.fromkeys(("system", "attach", "schema", "regex", "choice", "fit"), off)
        return {**named, "theme": chosen_themes, "code": blocks, "save": blocks}

    def action_stop(self) -> None:
        """One step back: out of the list of chats, out of browse mode, else stop the answer, else
        give up an edit. With nothing of that, browse. Right after an answer has ended it was
        meant to stop that."""
        if self.leave_panel():
            return
        if self.is_streaming:
            self.stop_answer()
        elif self.editing is not None:
            self.end_editing()
        elif self.is_browsing or not self.prompt.has_focus:
            self.mark(None)
            self.prompt.focus()
        elif time.monotonic() - self._ended_s > STOP_GRACE_S:
            self.begin_browsing()

    def action_clear(self) -> None:
        self.set_conversation(Conversation(system_prompt=self.conversation.system_prompt))
        self.prompt.focus()

    def action_new_chat(self) -> None:
        self.set_conversation(Conversation(system_prompt=self._ui.system_prompt))
        self.close_narrow_panel()

    def action_retry(self) -> None:
        self.regenerate()

    def action_fit(self) -> None:
        """A message that did not fit is sent again."""
        self.fit("")
        if self.prompt.text.strip() and not self.is_streaming:
            self.prompt.action_submit()

    def action_edit(self) -> None:
        self.edit()

    def action_tokens(self) -> None:
        self.look_at_tokens()

    def action_sibling(self, by: int) -> None:
        self.switch_sibling(by)

    def action_move_cursor(self, by: int) -> None:
        self.move_cursor(by)

    def action_copy_answer(self) -> None:
        """The marked one, else the last."""
        marked = self._cursor
        answer = marked.answer if marked is not None else self.conversation.last_answer
        if not answer:
            self.notify("no answer to copy yet", severity="warning")
            return
        self.copy(answer)
        self.notify("answer copied")

    def action_begin_command(self, name: str) -> None:
        """Its argument is to be written. What was in the prompt is the newest of the history."""
        self.end_editing()
        if self.prompt.text.strip():
            self.prompt.accept(self.prompt.text)
        self.prompt.set_text(f"/{name} ")
        self.prompt.focus()

    def action_scroll_transcript(self, pages: int) -> None:
        height = max(1, self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=pages * height, animate=False)

    def _run_command(self, name: str, argument: str) -> None:
        if self.run_tool(name, argument):
            return
        if name == "system":
            self._set_system(argument)
        elif name == "theme":
            self._set_theme(argument)
        elif name == "fit":
            self.fit(argument)
        elif name == "rename":
            self.rename_open(argument)
        elif name == "export":
            self.export(argument)
        elif name == "import":
            self.import_chat(argument)
        elif name == "model":
            self.post_message(ModelsWanted(argument))
        elif name == "engine":
            self.call_later(self.app.run_action, "app.show('dashboard')")
        elif name == "help":
            self.call_later(self.app.run_action, "app.help")
        elif name == "quit":
            self.call_later(self.app.run_action, "app.quit")
        else:
            actions = {
                "clear": self.action_clear,
                "new": self.action_new_chat,
                "copy": self.action_copy_answer,
                "retry": self.action_retry,
                "edit": self.action_edit,
                "tokens": self.action_tokens,
                "sessions": self.action_sessions,
            }
            actions[name]()

    def _set_system(self, argument: str) -> None:
        if argument == "off":
            self.set_system_prompt(None)
            self.note("The system prompt is removed.")
        elif argument:
            self.set_system_prompt(argument)
            self.note(f"System prompt: {argument}")
        elif self.conversation.system_prompt:
            self.note(f"System prompt: {self.conversation.system_prompt}")
        else:
            key = key_of(self, "chat.system")
            self.note(f"There is no system prompt. `/system TEXT` or {key} sets one.")

    def _set_theme(self, name: str) -> None:
        if not name:
            self.call_later(self.app.run_action, "app.change_theme")
        elif name in self.app.available_themes:
            self.app.theme = name
        else:
            names = ", ".join(n for n in self.app.available_themes if n.startswith("termgen"))
            self.note(f"No theme {clean_line(name)!r}. There are {names}, and Textual's own.")

    def _paint_status(self, width: int, _height: int) -> Sequence[Row]:
        turns = self.conversation.turns
        status = ChatStatus(
            stats=turns[-1].stats if turns else None,
            streaming=self.is_streaming,
            context_tokens=self.conversation.context_tokens,
            temperature=self._params.temperature,
            changes=self.request_changes(),
            now_s=self._clock(),
            behind=self.is_streaming and not self.transcript.at_end,
        )
        return [status_row(self._client.model, status, width)]
