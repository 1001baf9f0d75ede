"""A list over the chat, narrowed by typed words. Gives back what one of its lines stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

T = TypeVar("T")


class SearchPanel(ModalScreen[T | None]):
    """A subclass has the bindings, among them `move` and `dismiss`, and the words of its frame."""

    MAX_CHARS: int
    """Longest text to look for."""

    def __init__(self, name: str, wanted: str = "") -> None:
        """name: id of the frame. wanted: words to begin with."""
        super().__init__()
        self._frame = name
        self._wanted = wanted
        self._found: list[T] = []

    def words(self) -> tuple[str, str, str]:
        """Title and subtitle of the frame, and what the empty field says."""
        raise AssertionError("a subclass has them")

    def find(self, wanted: str) -> tuple[Sequence[tuple[T, Content]], int]:
        """What has all words, with its line, and the place of the one to begin at."""
        raise AssertionError("a subclass does")

    def compose(self) -> ComposeResult:
        title, subtitle, hint = self.words()
        with Vertical(id=self._frame, classes="panel") as box:
            box.border_title, box.border_subtitle = title, subtitle
            yield Input(
                self._wanted,
                placeholder=hint,
                compact=True,
                max_length=self.MAX_CHARS,
                select_on_focus=False,
            )
            found = OptionList(compact=True, markup=False)
            found.can_focus = False  # the keys are this screen's
            yield found

    def on_mount(self) -> None:
        self._search(self._wanted)

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        self._search(event.value)

    def _search(self, wanted: str) -> None:
        lines, first = self.find(wanted)
        self._found = [what for what, _ in lines]
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(Option(line) for _, line in lines)
        options.highlighted = first if lines else None

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        if self._found:
            options.highlighted = ((options.highlighted or 0) + by) % len(self._found)

    @on(Input.Submitted)
    def _take(self) -> None:
        chosen = self.query_one(OptionList).highlighted
        self.dismiss(self._found[chosen] if chosen is not None else None)

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._found[event.option_index])
