"""The chat screen: keys, commands and status line around the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from textual import on
from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content
from textual.widgets import Footer

from termgen.client import EngineClient
from termgen.tui import commands
from termgen.tui.conversation import Conversation
from termgen.tui.key_hints import brief_key_of, key_of
from termgen.tui.messages import ModelsWanted, PromptEdited, PromptSubmitted
from termgen.tui.render.chat import ChatStatus, empty_rows, status_row
from termgen.tui.sanitize import clean_line
from termgen.tui.screens.chat_keys import KEYS
from termgen.tui.screens.chat_tool_keys import COMMAND_KEYS, COPY_KEYS, TOOL_KEYS
from termgen.tui.screens.sessions import SessionScreen
from termgen.tui.spans import Row, cut
from termgen.tui.widgets.canvas import Canvas
from termgen.tui.widgets.entries import NoticeEntry
from termgen.tui.widgets.file_completion import FileCompletion
from termgen.tui.widgets.prompt import Prompt
from termgen.tui.widgets.session_panel import SessionPanel
from termgen.tui.widgets.transcript import Transcript


class ChatScreen(SessionScreen):
    AUTO_FOCUS = "Prompt"
    BINDINGS = [*KEYS, *TOOL_KEYS, *COMMAND_KEYS, *COPY_KEYS]

    def compose(self) -> ComposeResult:
        yield SessionPanel(self._wall_clock, id="sessions")
        self.status = Canvas(self._paint_status, id="status")
        yield self.status
        self.transcript = Transcript(id="transcript")
        yield self.transcript
        with Container(id="prompt-area"):
            completion = FileCompletion(id="completion")
            yield completion
            self.prompt = Prompt(completion, id="prompt")
            yield self.prompt
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
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
        elif self.is_streaming:
            self.prompt.give_back(message.text)
            self.say_streaming()
        else:
            attachments, beside = self.take_files(message.text), self.editing
            if attachments is None:
                self.prompt.give_back(message.text)
            else:
                self._accept(message.text)
                self.ask(message.text, attachments, beside=beside)

    def _accept(self, text: str) -> None:
        self.prompt.accept(text)
        self.end_editing(typed=self.prompt.text)

    @on(PromptEdited)
    def _edited(self, message: PromptEdited) -> None:
        matches = commands.matching(message.text)
        parsed = commands.parse(message.text)
        if not matches and parsed is not None and parsed[0].argument:
            matches = [parsed[0]]  # its argument is being written
        if not matches:
            hint = self._hint
        elif len(matches) == 1:
            hint = f"/{matches[0].name} {matches[0].argument}".rstrip() + f"  {matches[0].help}"
        else:
            hint = "  ".join(f"/{command.name}" for command in matches)
        self.label_prompt(self._label)
        # as content: what a command takes may look like markup
        self.prompt.border_subtitle = Content(cut(hint, max(8, self.prompt.size.width - 4)))

    def action_stop(self) -> None:
        """Out of the list of chats, else stop the answer, else give up an edit."""
        if self.leave_panel():
            return
        if self.is_streaming:
            self.stop_answer()
        elif self.editing is not None:
            self.end_editing()
        else:
            self.prompt.focus()

    def action_clear(self) -> None:
        self.set_conversation(Conversation(system_prompt=self.conversation.system_prompt))
        self.prompt.focus()

    def action_new_chat(self) -> None:
        self.set_conversation(Conversation(system_prompt=self._ui.system_prompt))
        self.close_narrow_panel()

    def action_retry(self) -> None:
        self.regenerate()

    def action_edit(self) -> None:
        self.edit()

    def action_tokens(self) -> None:
        self.look_at_tokens()

    def action_sibling(self, by: int) -> None:
        self.switch_sibling(by)

    def action_move_cursor(self, by: int) -> None:
        self.move_cursor(by)

    def action_copy_answer(self) -> None:
        answer = self.conversation.last_answer
        if answer is None:
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

    def action_focus_prompt(self) -> None:
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
