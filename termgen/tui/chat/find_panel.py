"""The questions of a chat, as an outline; those whose turn has every word that is typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from termgen.tui.chat.state.conversation import Turn
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.sanitize import clean_line

MAX_CHARS = 200
"""Longest text to look for."""
QUESTION_CHARS = 200
BEFORE_CHARS, AFTER_CHARS = 30, 120
"""An excerpt: what is shown around the first word that was found."""


class Hit(NamedTuple):
    place: int
    """Index of the turn on the path."""
    question: str
    """Its beginning, in one line."""
    before: str = ""
    word: str = ""
    after: str = ""
    """What is around the first word in the answer; empty if the question has them all."""


def find(turns: Sequence[Turn], wanted: str) -> list[Hit]:
    """Turns whose question and answer together have every word, in whatever case; all without
    words."""
    words = [re.compile(re.escape(word), re.IGNORECASE) for word in wanted.split()]
    hits = []
    for place, turn in enumerate(turns):
        missing = [word for word in words if not word.search(turn.question)]
        found = [word.search(turn.answer) for word in missing]
        if not all(found):
            continue
        question = clean_line(turn.question[:QUESTION_CHARS])
        first = found[0] if found else None
        if first is None:
            hits.append(Hit(place, question))
            continue
        start, end = first.span()
        text = turn.answer
        hits.append(
            Hit(
                place,
                question,
                clean_line(text[max(0, start - BEFORE_CHARS) : start]),
                clean_line(first.group()),
                clean_line(text[end : end + AFTER_CHARS]),
            )
        )
    return hits


class FindPanel(ModalScreen[int | None]):
    """Gives back the index of a turn."""

    BINDINGS = [
        Binding("f8,up", "move(-1)", "Earlier", id="find.earlier", tooltip="An earlier question"),
        Binding("down", "move(1)", "Later", id="find.later", tooltip="A later question"),
        Binding(
            "escape",
            "dismiss",
            "Close",
            id="find.close",
            tooltip="Close, and stay where the chat was",
        ),
    ]

    def __init__(self, turns: Sequence[Turn], wanted: str = "", marked: int | None = None) -> None:
        """wanted: words to begin with. marked: the turn to begin at; None: the last one."""
        super().__init__()
        assert turns, "there is one to choose"
        self._turns = turns
        self._wanted = wanted
        self._marked = marked
        self._hits: list[Hit] = []

    def compose(self) -> ComposeResult:
        with Vertical(id="find", classes="panel") as box:
            box.border_title = "find in this chat"
            earlier, close = brief_key_of(self, "find.earlier"), brief_key_of(self, "find.close")
            box.border_subtitle = f"⏎ go there · {earlier} earlier · {close} close"
            yield Input(
                self._wanted,
                placeholder="words of a question or its answer",
                compact=True,
                max_length=MAX_CHARS,
                select_on_focus=False,
            )
            hits = OptionList(compact=True, markup=False)
            hits.can_focus = False  # the keys are this screen's
            yield hits

    def on_mount(self) -> None:
        self._search(self._wanted)

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        self._search(event.value)

    def _search(self, wanted: str) -> None:
        self._hits = find(self._turns, wanted)
        places = [hit.place for hit in self._hits]
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(map(_option, self._hits))
        at = places.index(self._marked) if self._marked in places else len(places) - 1
        options.highlighted = at if places else None

    def action_move(self, by: int) -> None:
        if self._hits:
            options = self.query_one(OptionList)
            options.highlighted = ((options.highlighted or 0) + by) % len(self._hits)

    @on(Input.Submitted)
    def _take(self) -> None:
        chosen = self.query_one(OptionList).highlighted
        self.dismiss(self._hits[chosen].place if chosen is not None else None)

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._hits[event.option_index].place)


def _option(hit: Hit) -> Option:
    number = (f"{hit.place + 1:>3}  ", "dim")
    if not hit.word:
        return Option(Content.assemble(number, hit.question))
    excerpt = ((f"\n     {hit.before}", "dim"), (hit.word, "bold"), (hit.after, "dim"))
    return Option(Content.assemble(number, hit.question, *excerpt))
