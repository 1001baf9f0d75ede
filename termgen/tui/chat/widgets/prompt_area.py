"""The foot of a chat: the prompt, the completion list, and the messages that wait to be sent.

The chat screen uses it, and the loading screen before a chat exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Container

from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.widgets.completion import Completion
from termgen.tui.chat.widgets.prompt import Prompt
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, Span, cut, spread

MAX_SHOWN = 4
"""Rows of waiting messages; if there are more, the first ones and their number."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message to be sent later, with its files."""

    text: str
    attachments: tuple[Attachment, ...] = ()


class PromptArea(Container):
    def __init__(self, *, until: str, id: str | None = None) -> None:
        """until: what the messages wait for, as in `sent when the answer ends`."""
        super().__init__(id=id)
        self.completion = Completion(id="completion")
        self.prompt = Prompt(self.completion, id="prompt")
        self.waiting: list[Waiting] = []
        """Messages in sending order."""
        self.is_held = False
        """The messages wait until the user sends them."""
        self._until = until
        self._rows = Canvas(self._paint, id="waiting")
        self._rows.display = False

    def compose(self) -> ComposeResult:
        yield self._rows
        yield self.completion
        yield self.prompt

    @on(Completion.Taken)
    def _take_clicked(self) -> None:
        self.prompt.complete()
        self.prompt.focus()

    def put(self, *messages: Waiting) -> None:
        """Append to the waiting messages."""
        self.waiting += messages
        self.show_waiting()

    def next(self) -> Waiting | None:
        """Take out the first message to be sent; None while messages are held, or without any."""
        if self.is_held or not self.waiting:
            return None
        first = self.waiting.pop(0)
        self.show_waiting()
        return first

    def take_back(self) -> Waiting | None:
        """Move the newest waiting message into the prompt, before its text."""
        if not self.waiting:
            return None
        last = self.waiting.pop()
        self.show_waiting()
        draft = self.prompt.text
        self.prompt.set_text(f"{last.text}\n{draft}" if draft.strip() else last.text)
        return last

    def hold(self, is_held: bool = True) -> None:
        self.is_held = is_held and bool(self.waiting)
        self.show_waiting()

    def drop_waiting(self) -> int:
        """Move waiting messages to the history, from which the user can recall them. Returns their
        number."""
        dropped, self.waiting = self.waiting, []
        for message in dropped:
            self.prompt.prompts.add(message.text)
        self.show_waiting()
        return len(dropped)

    @property
    def unsent(self) -> list[str]:
        """Everything written and not sent."""
        texts = [message.text for message in self.waiting]
        texts.append(self.prompt.text or self.prompt.last_put_away)
        return [text for text in texts if text.strip()]

    def show_waiting(self) -> None:
        self.is_held = self.is_held and bool(self.waiting)
        self.prompt.has_queue = bool(self.waiting)
        self._rows.display = bool(self.waiting)
        self._rows.styles.height = min(MAX_SHOWN, len(self.waiting))
        self._rows.repaint()

    def _paint(self, width: int, _height: int) -> Sequence[Row]:
        send = brief_key_of(self, "prompt.send")
        when = f"held: {send} sends" if self.is_held else f"sent {self._until}"
        hints = [f"{when} · ↑ takes back", "↑ takes back", ""]
        hint = next(hint for hint in hints if not hint or len(hint) <= width - 24)
        rows: list[Row] = []
        shown = self.waiting[:MAX_SHOWN]
        for index, message in enumerate(shown):
            is_last = index == len(shown) - 1
            left = len(self.waiting) - len(shown)
            more = f"+{left} more  " if is_last and left else ""
            end: list[Span] = [(more + (hint if not index else ""), "muted")]
            text = cut(clean_line(" ".join(message.text.split())), max(1, width - 12))
            sign: Span = ("■ ", "warn") if self.is_held else ("⧗ ", "accent")
            rows.append(spread([sign, (text, "text")], end, width))
        return rows
