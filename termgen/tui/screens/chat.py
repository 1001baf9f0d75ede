"""The chat screen: prompt, transcript, status line, and the worker that reads an answer.

The text of an answer arrives on this loop token by token and is drawn at most `FLUSH_HZ` times a
second, less often when a frame costs much.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import count

from textual import getters, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.widgets import Footer
from textual.worker import Worker

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.engine.request import FinishReason
from termgen.errors import ContextLengthError, EngineError, RequestError, TermgenError
from termgen.tui import commands
from termgen.tui.conversation import AnswerState, Conversation, Turn, sampling_params
from termgen.tui.messages import ModelsWanted, PromptEdited, PromptSubmitted
from termgen.tui.render.chat import ChatStatus, empty_rows, status_row
from termgen.tui.sanitize import clean_line
from termgen.tui.screens.base import ThemedScreen
from termgen.tui.spans import Row, cut
from termgen.tui.widgets.canvas import Canvas
from termgen.tui.widgets.entries import AnswerEntry, NoticeEntry, QuestionEntry
from termgen.tui.widgets.prompt import Prompt
from termgen.tui.widgets.transcript import Transcript

FLUSH_HZ = 15.0
FLUSH_SHARE = 0.25
"""Drawing the answer may take this share of the thread, not more."""
HINT = "⏎ send  ^J new line  / commands"


class ChatScreen(ThemedScreen):
    AUTO_FOCUS = "Prompt"
    BINDINGS = [
        Binding("escape", "stop", "Stop", id="chat.stop", tooltip="Stop the answer, keep its text"),
        Binding("ctrl+l", "clear", "Clear", id="chat.clear", tooltip="Forget the conversation"),
        Binding(
            "ctrl+n",
            "new_chat",
            "New",
            id="chat.new",
            tooltip="Start over, with the system prompt the chat began with",
        ),
        Binding(
            "ctrl+r", "retry", "Retry", id="chat.retry", tooltip="Answer the last question again"
        ),
        Binding(
            "y",
            "copy_answer",
            "Copy answer",
            show=False,
            id="chat.copy",
            tooltip="Copy the last answer (outside the prompt; /copy inside)",
        ),
        Binding("i", "focus_prompt", "Write", show=False, id="chat.write", tooltip="To the prompt"),
        Binding(
            "f2,2",
            "app.show('dashboard')",
            "Engine",
            id="chat.engine",
            tooltip="Watch the engine (2 outside the prompt)",
        ),
        Binding(
            "f5",
            "app.models",
            "Model",
            show=False,
            id="chat.models",
            tooltip="Choose another model (/model)",
        ),
        Binding(
            "shift+pageup,ctrl+up",
            "scroll_transcript(-1)",
            "Page up",
            show=False,
            id="chat.page_up",
            tooltip="Scroll the transcript up",
        ),
        Binding(
            "shift+pagedown,ctrl+down",
            "scroll_transcript(1)",
            "Page down",
            show=False,
            id="chat.page_down",
            tooltip="Scroll the transcript down",
        ),
    ]

    prompt = getters.query_one(Prompt)
    transcript = getters.query_one(Transcript)
    status = getters.query_one("#status", Canvas)

    def __init__(
        self, client: EngineClient, ui: UIConfig, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__()
        self._client = client
        self._ui = ui
        self._clock = clock
        self._params = sampling_params(client.model.default_params, ui)
        self._entries: dict[Turn, tuple[QuestionEntry, AnswerEntry]] = {}
        self._streaming: Turn | None = None
        self._worker: Worker[None] | None = None
        self._next_flush_s = 0.0
        self._request_ids = count(1)
        self.conversation = Conversation(system_prompt=ui.system_prompt)

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint_status, id="status")
        yield Transcript(id="transcript")
        with Container(id="prompt-area"):
            yield Prompt(id="prompt")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        super().on_mount()
        model = self._client.model
        self.transcript.set_empty(lambda width, height: empty_rows(model, width, height))
        self.prompt.border_subtitle = HINT
        self._flusher = self.set_interval(1 / FLUSH_HZ, self._flush, pause=True)
        self.watch(self.transcript, "scroll_y", self.status.repaint, init=False)

    @property
    def is_streaming(self) -> bool:
        return self._streaming is not None

    def set_client(self, client: EngineClient, *, failure: str | None) -> None:
        """Another model answers from here on; `failure` says why it is not the one asked for."""
        self._client, model = client, client.model
        self._params = sampling_params(model.default_params, self._ui)
        self.transcript.set_empty(lambda width, height: empty_rows(model, width, height))
        if failure is not None:
            hint = f"{clean_line(model.model_id)} answers as before."
            self.transcript.add(NoticeEntry(failure, role="bad", sign="✗", hint=hint))
        elif self.conversation.turns:
            self._note(f"{clean_line(model.model_id)} answers from here on.")
        self.status.repaint()
        self.prompt.focus()

    def quote_back(self, text: str) -> None:
        """Put a question that was not answered back into the prompt, before what is there."""
        draft = self.prompt.text
        self.prompt.set_text(f"{text}\n{draft}" if draft.strip() else text)

    @on(PromptSubmitted)
    def _submitted(self, message: PromptSubmitted) -> None:
        parsed = commands.parse(message.text)
        if parsed is not None:
            self.prompt.accept(message.text)
            self._run_command(parsed[0].name, parsed[1])
        elif commands.looks_like_command(message.text):
            self.notify(f"no command {message.text.strip()}; F1 lists them", severity="warning")
        elif self.is_streaming:
            self.notify("an answer is being written; esc stops it", severity="warning")
        else:
            self.prompt.accept(message.text)
            self.ask(message.text)

    @on(PromptEdited)
    def _edited(self, message: PromptEdited) -> None:
        matches = commands.matching(message.text)
        if not matches:
            hint = HINT
        elif len(matches) == 1:
            hint = f"/{matches[0].name} {matches[0].argument}".rstrip() + f"  {matches[0].help}"
        else:
            hint = "  ".join(f"/{command.name}" for command in matches)
        self.prompt.border_subtitle = cut(hint, max(8, self.prompt.size.width - 4))

    def ask(self, question: str) -> None:
        """Add a question to the conversation and stream its answer."""
        turn = self.conversation.ask(question, now_s=self._clock())
        answer = AnswerEntry(turn, self._client.model, clock=self._clock)
        entries = QuestionEntry(question), answer
        self._entries[turn] = entries
        for entry in entries:
            self.transcript.add(entry)
        self._streaming = turn
        self._flusher.resume()
        self._worker = self._answer(turn, answer)
        self.status.repaint()

    @work(group="answer")
    async def _answer(self, turn: Turn, entry: AnswerEntry) -> None:
        request_id = f"chat-{next(self._request_ids)}"
        stream = self._client.generate(
            self.conversation.prompt(), self._params, request_id=request_id
        )
        try:
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    first = not turn.stats.output_tokens
                    turn.answer += delta.text
                    turn.stats.update(delta, self._clock())
                    entry.feed(delta.text)
                    if delta.finish_reason is FinishReason.ERROR:
                        raise delta.error or EngineError("the engine failed this request")
                    if first:
                        self._flush()
        except (RequestError, EngineError) as error:
            self._fail(turn, error)
        else:
            aborted = turn.stats.finish_reason is FinishReason.ABORT
            self._finish(turn, AnswerState.STOPPED if aborted else AnswerState.DONE)

    def _finish(self, turn: Turn, state: AnswerState) -> None:
        if turn.state is not AnswerState.STREAMING:
            return  # it was stopped before its end was read
        turn.state = state
        entry = self._entries[turn][1]
        entry.close()
        self.transcript.update(entry)
        self._streaming = self._worker = None
        self._flusher.pause()
        self.status.repaint()

    def _fail(self, turn: Turn, error: TermgenError) -> None:
        """Say what went wrong; a question without any answer goes back to the prompt."""
        if turn.state is not AnswerState.STREAMING:
            return
        self._finish(turn, AnswerState.FAILED)
        hint = ""
        if not turn.answer:
            self._take_back(turn)
            self.quote_back(turn.question)
            hint = "Your message is back in the prompt."
        if isinstance(error, ContextLengthError):
            hint = f"{hint} /clear makes room by forgetting the conversation.".strip()
        elif not self._client.is_healthy:
            hint = f"{hint} The engine has stopped: leave with ctrl+q and start again.".strip()
        self.transcript.add(NoticeEntry(str(error), role="bad", sign="✗", hint=hint))

    def _take_back(self, turn: Turn) -> None:
        self.conversation.withdraw(turn)
        for entry in self._entries.pop(turn):
            self.transcript.remove_entry(entry)
        self.status.repaint()

    def _flush(self) -> None:
        """Draw what has arrived, unless the last drawing cost more than its share."""
        turn = self._streaming
        if turn is None or time.perf_counter() < self._next_flush_s:
            return
        started = time.perf_counter()
        self.transcript.update(self._entries[turn][1])
        self.status.repaint()
        spent = time.perf_counter() - started
        self._next_flush_s = started + spent / FLUSH_SHARE if spent > 0.02 else 0.0

    def action_stop(self) -> None:
        """Stop the answer and keep its text; without one, go to the prompt."""
        turn, worker = self._streaming, self._worker
        if turn is None:
            self.prompt.focus()
            return
        if worker is not None:
            worker.cancel()  # closes the stream, which aborts the request
        self._finish(turn, AnswerState.STOPPED)

    def action_clear(self) -> None:
        if self.is_streaming:
            self.action_stop()
        self.conversation.clear()
        self._entries.clear()
        self.transcript.clear()
        self.status.repaint()
        self.prompt.focus()

    def action_new_chat(self) -> None:
        self.action_clear()
        self.conversation.system_prompt = self._ui.system_prompt

    def action_retry(self) -> None:
        """Ask the last question again; its answer is replaced."""
        if self.is_streaming:
            self.action_stop()
        if not self.conversation.turns:
            self.notify("nothing to answer again yet", severity="warning")
            return
        turn = self.conversation.turns[-1]
        self._take_back(turn)
        self.ask(turn.question)

    def action_copy_answer(self) -> None:
        answer = self.conversation.last_answer
        if answer is None:
            self.notify("no answer to copy yet", severity="warning")
            return
        self.app.copy_to_clipboard(answer)
        self.notify("answer copied")

    def action_focus_prompt(self) -> None:
        self.prompt.focus()

    def action_scroll_transcript(self, pages: int) -> None:
        height = max(1, self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=pages * height, animate=False)

    async def action_edit_system(self) -> None:
        """Start writing a system prompt."""
        self.prompt.set_text(f"/system {self.conversation.system_prompt or ''}")
        self.prompt.focus()

    def _run_command(self, name: str, argument: str) -> None:
        if name == "system":
            self._set_system(argument)
        elif name == "theme":
            self._set_theme(argument)
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
            }
            actions[name]()

    def _set_system(self, argument: str) -> None:
        if argument == "off":
            self.conversation.system_prompt = None
            self._note("The system prompt is removed.")
        elif argument:
            self.conversation.system_prompt = argument
            self._note(f"System prompt: {argument}")
        elif self.conversation.system_prompt:
            self._note(f"System prompt: {self.conversation.system_prompt}")
        else:
            self._note("There is no system prompt. `/system TEXT` sets one.")

    def _set_theme(self, name: str) -> None:
        if not name:
            self.call_later(self.app.run_action, "app.change_theme")
        elif name in self.app.available_themes:
            self.app.theme = name
        else:
            names = ", ".join(n for n in self.app.available_themes if n.startswith("termgen"))
            self._note(f"No theme {clean_line(name)!r}. There are {names}, and Textual's own.")

    def _note(self, text: str) -> None:
        self.transcript.add(NoticeEntry(text))

    def _paint_status(self, width: int, _height: int) -> Sequence[Row]:
        turns = self.conversation.turns
        status = ChatStatus(
            stats=turns[-1].stats if turns else None,
            streaming=self.is_streaming,
            context_tokens=self.conversation.context_tokens,
            temperature=self._params.temperature,
            now_s=self._clock(),
            behind=self.is_streaming and not self.transcript.at_end,
        )
        return [status_row(self._client.model, status, width)]
