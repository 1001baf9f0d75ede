"""Asks whether a tool may be called: once, always, or not at all.

It comes up while the user may be typing. So a key acts only after a moment without keys, and until
then letters go on into the prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from termgen.tools.calls import Approval, ToolCall, arguments_of
from termgen.tools.text import escaped, shortened
from termgen.tools.toolbox import Offered
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.sanitize import clean, clean_line

QUIET_S = 0.7
"""A key that comes after a pause as long as this is meant for the panel."""
MAX_SHOWN_CHARS = 8000
MAX_DESCRIPTION_CHARS = 300


class ApprovalPanel(ModalScreen[Approval | None]):
    """Gives back the user's word, None to stop the answer."""

    BINDINGS = [
        Binding("y", "answer('once')", "Once", id="approval.once", tooltip="Run this call"),
        Binding(
            "a",
            "answer('always')",
            "Always",
            id="approval.always",
            tooltip="Run it, and do not ask about this tool again until termgen ends",
        ),
        Binding(
            "n",
            "answer('deny')",
            "Deny",
            id="approval.deny",
            tooltip="Do not run it; the model reads that it was denied",
        ),
        Binding(
            "escape", "stop", "Stop", id="approval.stop", tooltip="Do not run it; stop the answer"
        ),
        Binding("up", "scroll(-1)", "Up", show=False, id="approval.up", tooltip="A line up"),
        Binding("down", "scroll(1)", "Down", show=False, id="approval.down", tooltip="A line down"),
    ]

    def __init__(
        self,
        call: ToolCall,
        offered: Offered,
        *,
        type_text: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """type_text: takes letters that were not meant for the panel."""
        super().__init__()
        self._call = call
        self._offered = offered
        self._type = type_text
        self._clock = clock
        self._key_s = clock()
        """Time of the last key, or of the beginning."""
        self._is_hasty = False
        self._is_withdrawn = False

    def compose(self) -> ComposeResult:
        with Vertical(id="approval", classes="panel") as box:
            key = partial(brief_key_of, self)
            box.border_title = Content(f"may {clean_line(self._offered.provider)} do this?")
            box.border_subtitle = Content(
                f"{key('approval.once')} once · {key('approval.always')} always this tool · "
                f"{key('approval.deny')} deny · {key('approval.stop')} stop"
            )
            yield Static(Content(clean_line(self._offered.name)), id="approval-name")
            words = shortened(escaped(self._offered.tool.description), MAX_DESCRIPTION_CHARS)
            yield Static(Content(clean(words)), id="approval-about")
            with VerticalScroll(id="approval-arguments", can_focus=False):
                yield Static(Content(clean(self._arguments())))

    def _arguments(self) -> str:
        parsed = arguments_of(self._call.arguments)
        text = json.dumps(parsed, indent=2, ensure_ascii=False)
        return shortened(escaped(text), MAX_SHOWN_CHARS)

    def on_key(self, event: events.Key) -> None:
        now = self._clock()
        self._is_hasty = now - self._key_s < QUIET_S
        self._key_s = now
        if self._is_hasty and event.character and event.is_printable:
            event.stop()
            event.prevent_default()
            self._type(event.character)

    def on_screen_resume(self) -> None:
        if self._is_withdrawn:
            self.call_later(self.dismiss, None)

    def withdraw(self) -> None:
        """Close it, as the question is settled or given up; a screen over it stays."""
        if self._is_withdrawn:
            return
        self._is_withdrawn = True
        if self.is_attached and self.is_current:
            self.dismiss(None)

    def action_answer(self, word: str) -> None:
        if not self._is_hasty:
            self._is_withdrawn = True
            self.dismiss(Approval(word))

    def action_stop(self) -> None:
        self._is_withdrawn = True
        self.dismiss(None)

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)
