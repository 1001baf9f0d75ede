"""The widgets of a chat, and the ways in which the chat's parts speak to the user.

`ChatScreen` owns one `ChatView` and hands it to its parts: `Settings` and `QuestionFiles` (asking),
`Dialogue`, `AnswerTools` and `SavedChats`. The widgets are kept here, not looked up: an answer may
end when the screen has lost them already.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial

from textual.screen import Screen
from textual.worker import Worker

from termgen.tui.chat.widgets.entries import NoticeEntry
from termgen.tui.chat.widgets.prompt_area import PromptArea
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.keys.keymap import KeyedApp, key_of
from termgen.tui.paint.canvas import Canvas, Painter
from termgen.tui.paint.sanitize import clean_line


class ChatView:
    def __init__(self, screen: Screen[None], paint_status: Painter) -> None:
        self.screen = screen
        self.status = Canvas(paint_status, id="status")
        self.transcript = Transcript(id="transcript")
        self.area = PromptArea(until="when the answer ends", id="prompt-area")
        self.prompt = self.area.prompt

    def key(self, name: str) -> str:
        """The key of an action, as people read it."""
        return key_of(self.screen, name)

    def note(self, text: str, *, hint: str = "") -> None:
        """Add a notice of termgen to the transcript."""
        self.transcript.add(NoticeEntry(text, hint=hint))

    def note_fault(self, text: str, *, hint: str) -> None:
        """Add a notice of something that failed to the transcript."""
        self.transcript.add(NoticeEntry(text, role="bad", sign="✗", hint=hint))

    def start_worker(
        self,
        group: str,
        function: Callable[..., Coroutine[None, None, None]],
        *arguments: object,
        exclusive: bool = False,
    ) -> Worker[None]:
        """Run a coroutine function as a worker of the screen. exclusive: instead of the group's
        other workers."""
        work = partial(function, *arguments)
        return self.screen.run_worker(work, group=group, exclusive=exclusive)

    def notify(self, text: str) -> None:
        self.screen.notify(text, markup=False)

    def warn(self, text: str) -> None:
        self.screen.notify(text, severity="warning", markup=False)

    def refuse(self, reason: object) -> None:
        self.screen.notify(clean_line(str(reason)), severity="error", markup=False)

    def copy(self, text: str, what: str) -> None:
        """Copy to the clipboard. A notice says what has become of `what`."""
        app = self.screen.app
        assert isinstance(app, KeyedApp)
        app.copy(text, what)
