"""The prompt: a multi-line field where Enter sends and ctrl+j breaks the line."""

from __future__ import annotations

from textual import events
from textual.binding import Binding
from textual.document._document import Document
from textual.widgets.text_area import Selection

from termgen.tui.chat.state.conversation import PromptHistory
from termgen.tui.chat.state.prompt_library import VARIABLE, next_variable
from termgen.tui.chat.widgets.completion import Completion
from termgen.tui.chat.widgets.messages import LargePaste, PromptEdited, PromptSubmitted, QueueWanted
from termgen.tui.chat.widgets.safe_text_area import SafeTextArea

LARGE_PASTE_CHARS = 10_000
"""A paste longer than this is attached as a file instead of inserted."""
_NEWLINE_KEYS = frozenset(("shift+enter", "alt+enter", "newline"))
"""Keys that break the line whatever the settings bind them to."""


class Prompt(SafeTextArea):
    """Posts `PromptSubmitted`; the screen sends it, or gives it back."""

    BINDINGS = [
        Binding(
            "enter", "submit", "Send", show=False, id="prompt.send", tooltip="Send the message"
        ),
        Binding(
            "ctrl+j,alt+enter",
            "newline",
            "New line",
            show=False,
            id="prompt.newline",
            tooltip="Break the line",
        ),
    ]

    def __init__(self, completion: Completion, *, id: str | None = None) -> None:
        super().__init__(
            id=id,
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            compact=True,
            placeholder="Message",
        )
        self.prompts = PromptHistory()
        self._completion = completion
        self.has_queue = False
        """Messages wait to be sent: the up key takes back the last one before it walks the
        history."""
        self.last_put_away = ""
        """The draft that was moved to the history, until the user edits again."""
        self._shown_text: str | None = None
        """Text set by the program, not typed: it opens no completion list."""

    async def _on_key(self, event: events.Key) -> None:
        """Handle bound keys before `TextArea`'s own handler, which would type some of them."""
        if event.key in ("tab", "shift+tab") or (
            event.key == "escape" and self._completion.is_open
        ):
            event.stop()
            event.prevent_default()
            self._edit_completion(event.key)
            return
        bound = self.screen.active_bindings.get(event.key)
        if bound is not None and bound.node is self and bound.binding.id is not None:
            action = bound.binding.action
        elif event.key in _NEWLINE_KEYS:
            action = "newline"
        elif event.key in ("up", "down"):  # synchronous, since enter may follow
            action = f"cursor_{event.key}"
        else:
            return
        event.stop()
        event.prevent_default()
        await self.run_action(action)

    def _edit_completion(self, key: str) -> None:
        """Tab never leaves the prompt: it takes what is selected, or opens the list again."""
        if not self._completion.is_open:
            if not (key == "tab" and self.select_variable()):
                self._look()
        elif key == "tab":
            self.complete()
        elif key == "shift+tab":
            self._completion.move(-1)
        else:
            self._completion.close()

    async def _on_paste(self, event: events.Paste) -> None:
        if len(event.text) > LARGE_PASTE_CHARS:
            event.stop()
            event.prevent_default()
            self.post_message(LargePaste(event.text))

    def action_submit(self) -> None:
        self._catch_up()
        if self._completion.takes_enter:
            self.complete()
        elif not self.text.strip():
            self.post_message(QueueWanted("send"))
        else:
            text, self.text = self.text, ""  # synchronous: later keys are a new text
            self.post_message(PromptSubmitted(text))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_cursor_up(self, select: bool = False) -> None:
        if self._completion.is_open:
            self._completion.move(-1)
            return
        if self.has_queue and not self.text and not select:
            self.post_message(QueueWanted("take back"))
            return
        older = None if select or not self.at_first_line else self.prompts.older(self.text)
        if older is None:
            super().action_cursor_up(select)
        else:
            self._show(older)

    def action_cursor_down(self, select: bool = False) -> None:
        if self._completion.is_open:
            self._completion.move(1)
            return
        newer = None if select or not self.at_last_line else self.prompts.newer()
        if newer is None:
            super().action_cursor_down(select)
        else:
            self._show(newer)

    @property
    def at_first_line(self) -> bool:
        """True if the cursor is on the first row as wrapped on the screen."""
        return self.navigator.is_first_wrapped_line(self.cursor_location)

    @property
    def at_last_line(self) -> bool:
        return self.navigator.is_last_wrapped_line(self.cursor_location)

    def select_variable(self) -> bool:
        """Select the next `{{variable}}`, to be typed over; False if there is none."""
        document, selected = self.document, self.selection
        assert isinstance(document, Document)
        is_one = VARIABLE.fullmatch(self.selected_text) is not None
        after = document.get_index_from_location(selected.end) if is_one else 0
        found = next_variable(self.text, after)
        if found is None:
            return False
        start, end = map(document.get_location_from_index, found)
        self.selection = Selection(start, end)
        return True

    def set_text(self, text: str) -> None:
        """Show `text` with the cursor at its end; the history does not change."""
        self.prompts.reset()
        self._show(text)

    def accept(self, text: str) -> None:
        """Add the sent text to the history."""
        self.prompts.add(text)

    def give_back(self, text: str) -> None:
        """Restore a text that was not sent, in front of anything typed since."""
        self._show(text + self.text)

    def type(self, text: str) -> None:
        """Insert text that was typed or pasted while another widget had the focus."""
        self.screen.set_focus(self)  # synchronous, since another key may follow
        self.insert(text)

    def on_resize(self) -> None:
        """Texts on the border depend on the width."""
        self.post_message(PromptEdited(self.text))

    def on_text_area_changed(self) -> None:
        self.post_message(PromptEdited(self.text))
        if self.text:
            self.last_put_away = ""
        if self.text == self._shown_text:
            self._completion.close()
        else:
            self._shown_text = None
            self._look()

    def _look(self) -> None:
        """Show the completions at the cursor."""
        before = self._before_cursor
        self._completion.look(before, is_whole=before == self.text)

    def _catch_up(self) -> None:
        """Keys may arrive before the list has handled the message about the last change."""
        if self._completion.is_open and self._completion.before != self._before_cursor:
            self._look()

    @property
    def _before_cursor(self) -> str:
        """The cursor's line up to the cursor."""
        row, column = self.cursor_location
        return str(self.document.get_line(row))[:column]

    def complete(self) -> None:
        """Replace the partial text by the selected completion."""
        self._catch_up()
        if not self._completion.is_open:
            return
        choice, (row, column) = self._completion.selected, self.cursor_location
        start = column - choice.replaces
        if start < 0:  # the cursor has moved since the list opened
            self._completion.close()
            return
        self.replace(choice.text, (row, start), (row, column))
        self.move_cursor((row, start + len(choice.text)))

    def put_away(self) -> bool:
        """Move the draft to the history, where the up key finds it; False if it is empty."""
        text, self.text = self.text, ""
        if not text.strip():
            return False
        self.prompts.add(text)
        self.last_put_away = text
        return True

    def _show(self, text: str) -> None:
        self._shown_text = self.text = text
        self.move_cursor(self.document.end)
