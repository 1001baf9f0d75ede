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
from textual.worker import Worker

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.engine.request import FinishReason
from termgen.errors import ContextLengthError, EngineError, RequestError, TermgenError
from termgen.tui import commands
from termgen.tui.conversation import AnswerState, Conversation, Turn, sampling_params
from termgen.tui.messages import PromptEdited, PromptSubmitted
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
            "New chat",
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
            "2", "app.show('dashboard')", "Engine", show=False, id="chat.engine", tooltip="Engine"
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
        yield ChatFooter()

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
