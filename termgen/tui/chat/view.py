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

from termgen.system.choices import CHATS_COLUMNS, CHATS_OPEN
from termgen.tui.chat.widgets.entries import NoticeEntry
from termgen.tui.chat.widgets.prompt_area import PromptArea
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.keys.keymap import KeyedApp, key_of
from termgen.tui.paint.canvas import Canvas, Painter
from termgen.tui.paint.canvas_screen import ThemedScreen
from termgen.tui.paint.sanitize import clean_line


class ChatView:
    def __init__(self, screen: Screen[None], paint_status: Painter) -> None:
        self.screen = screen
        self.status = Canvas(paint_status, id="status")
        self.transcript = Transcript(id="transcript")
        self.area = PromptArea(until="when the answer ends", id="prompt-area")
        self.prompt = self.area.prompt
        self.tints_drafts = False
        """Guessed parts of answers are tinted."""

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
        self._app.copy(text, what)

    def remember(self, name: str, value: str | int) -> None:
        """Keep a choice for later runs."""
        self._app.remember(name, value)

    @property
    def is_narrow(self) -> bool:
        """True where the list of chats covers the chat."""
        return self.screen.app.size.width < ThemedScreen.HORIZONTAL_BREAKPOINTS[-1][0]

    @property
    def keeps_chats_open(self) -> bool:
        """True if the list was open beside the chat in the run before, and has room there now."""
        return self._app.choices.is_on(CHATS_OPEN) and not self.is_narrow

    @property
    def chats_columns(self) -> int:
        """Width of that list, if the user has changed it; 0: the usual one."""
        return self._app.choices.number(CHATS_COLUMNS)

    def keep_theme(self) -> None:
        """Begin later runs with the present theme, or say how to."""
        self._app.keep_theme()

    @property
    def _app(self) -> KeyedApp:
        app = self.screen.app
        assert isinstance(app, KeyedApp)
        return app
