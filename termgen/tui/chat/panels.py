"""Panels over the chat: sampling parameters, system prompt, earlier prompts.

Each gives back what was chosen when it closes, None when it was given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from termgen.tui.chat.lists.search_panel import SearchPanel
from termgen.tui.chat.state.sampling_fields import FIELDS, field_text, read_fields
from termgen.tui.chat.widgets.safe_text_area import SafeTextArea
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.sanitize import clean_line
from termgen.vocabulary.sampling_params import SamplingParams

MAX_FOUND = 50
MAX_FIELD_CHARS = 2000
"""Characters of a field of one line: more is slow, and too long to type."""
MAX_SYSTEM_CHARS = 50_000
"""Characters of a system prompt, pasted ones too."""


class Fields(VerticalScroll, can_focus=False, inherit_bindings=False):
    """A box that scrolls to the focused field. It has no keys of its own: the arrows, which would
    scroll it, go from field to field."""


class SamplingPanel(ModalScreen[SamplingParams | None]):
    """One field for each parameter; what is wrong with a value stands beside it."""

    BINDINGS = [
        Binding("enter", "apply", "Apply", id="sampling.apply", tooltip="Use these values"),
        Binding(
            "ctrl+r",
            "reset",
            "Defaults",
            id="sampling.reset",
            tooltip="Put the model's own values back",
        ),
        Binding(
            "escape", "dismiss", "Close", id="sampling.close", tooltip="Keep the values there were"
        ),
        Binding(
            "down",
            "app.focus_next",
            "Next field",
            show=False,
            id="sampling.next",
            tooltip="To the next value",
        ),
        Binding(
            "up",
            "app.focus_previous",
            "Field before",
            show=False,
            id="sampling.previous",
            tooltip="To the value before",
        ),
    ]

    def __init__(self, params: SamplingParams, defaults: SamplingParams) -> None:
        super().__init__()
        self._params = params
        self._defaults = defaults

    def compose(self) -> ComposeResult:
        with Fields(id="sampling", classes="panel") as box:
            box.border_title = "sampling"
            key = partial(brief_key_of, self)
            box.border_subtitle = (
                f"{key('sampling.apply')} apply · {key('sampling.reset')} the model's defaults · "
                f"{key('sampling.close')} change nothing"
            )
            for name in FIELDS:
                with Horizontal(classes="field"):
                    yield Label(name)
                    yield Input(
                        field_text(self._params, name),
                        placeholder=field_text(self._defaults, name) or "none",
                        compact=True,
                        max_length=MAX_FIELD_CHARS,
                        select_on_focus=False,
                        id=name,
                    )
                    yield Label(id=f"{name}-note", classes="note", markup=False)

    @on(Input.Changed)
    def _check(self) -> SamplingParams | None:
        texts = {name: self.query_one(f"#{name}", Input).value for name in FIELDS}
        params, errors = read_fields(texts, base=self._params, defaults=self._defaults)
        for name, help_text in FIELDS.items():
            note = self.query_one(f"#{name}-note", Label)
            wrong = f"✗ {errors[name]}" if name in errors else help_text
            note.update(Content(clean_line(wrong)))
            note.set_class(name in errors, "wrong")
        return params

    @on(Input.Submitted)
    def action_apply(self) -> None:
        params = self._check()
        if params is None:
            wrong = self.query(".wrong").first(Label)
            assert wrong.id is not None
            self.query_one(f"#{wrong.id.removesuffix('-note')}", Input).focus()
        else:
            self.dismiss(params)

    def action_reset(self) -> None:
        for name in FIELDS:
            self.query_one(f"#{name}", Input).value = field_text(self._defaults, name)


class SystemText(SafeTextArea):
    async def _on_paste(self, event: events.Paste) -> None:
        """Wrapping a megabyte would take seconds, for every key after it too."""
        if len(self.text) + len(event.text) > MAX_SYSTEM_CHARS:
            event.stop()
            event.prevent_default()
            most = f"{MAX_SYSTEM_CHARS:,} characters"
            self.notify(f"not pasted: a system prompt has at most {most}", severity="warning")


class SystemPromptPanel(ModalScreen[str | None]):
    """A text of any length; without any there is no system prompt."""

    BINDINGS = [
        Binding("ctrl+s", "save", "Use it", id="system.save", tooltip="Use this system prompt"),
        Binding(
            "escape",
            "dismiss",
            "Close",
            id="system.close",
            tooltip="Keep the system prompt there was",
        ),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(id="system", classes="panel") as box:
            box.border_title = "system prompt"
            use, close = brief_key_of(self, "system.save"), brief_key_of(self, "system.close")
            box.border_subtitle = f"{use} use it · {close} change nothing · empty: none"
            yield SystemText(self._text, show_line_numbers=False, highlight_cursor_line=False)

    def on_mount(self) -> None:
        area = self.query_one(SafeTextArea)
        area.move_cursor(area.document.end)

    def action_save(self) -> None:
        self.dismiss(self.query_one(SafeTextArea).text.strip())


class HistoryPanel(SearchPanel[str]):
    """Earlier prompts, newest first, those with every word that is typed."""

    BINDINGS = [
        Binding("ctrl+r,down", "move(1)", "Older", id="history.older", tooltip="An older prompt"),
        Binding("up", "move(-1)", "Newer", id="history.newer", tooltip="A newer prompt"),
        Binding(
            "escape",
            "dismiss",
            "Close",
            id="history.close",
            tooltip="Close, and keep what the prompt has",
        ),
    ]
    MAX_CHARS = MAX_FIELD_CHARS

    def __init__(self, prompts: Sequence[str]) -> None:
        """prompts: newest first."""
        super().__init__("history")
        self._prompts = prompts

    def words(self) -> tuple[str, str, str]:
        older, close = brief_key_of(self, "history.older"), brief_key_of(self, "history.close")
        return "earlier prompts", f"⏎ take it · {older} older · {close} close", "search"

    def find(self, wanted: str) -> tuple[Sequence[tuple[str, Content]], int]:
        words = wanted.lower().split()
        hits = (p for p in self._prompts if all(word in p.lower() for word in words))
        return [(hit, Content(clean_line(hit[:500]))) for hit in islice(hits, MAX_FOUND)], 0
