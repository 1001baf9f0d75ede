"""The questions of a chat, as an outline; those whose turn has every word that is typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from textual.binding import Binding
from textual.content import Content

from termgen.tui.chat.lists.search_panel import SearchPanel
from termgen.tui.chat.state.conversation import Turn
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.sanitize import clean_line

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
    words = words_pattern(wanted)
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


def words_pattern(wanted: str) -> list[re.Pattern[str]]:
    """What finds each word, in whatever case."""
    return [re.compile(re.escape(word), re.IGNORECASE) for word in wanted.split()]


class FindPanel(SearchPanel[tuple[int, str]]):
    """Gives back the index of a turn, and the words that it was found by."""

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
    MAX_CHARS = 200

    def __init__(self, turns: Sequence[Turn], wanted: str = "", marked: int | None = None) -> None:
        """wanted: words to begin with. marked: the turn to begin at; None: the last one."""
        super().__init__("find", wanted)
        self._turns = turns
        self._marked = marked

    def words(self) -> tuple[str, str, str]:
        earlier, close = brief_key_of(self, "find.earlier"), brief_key_of(self, "find.close")
        keys = f"⏎ go there · {earlier} earlier · {close} close"
        return "find in this chat", keys, "words of a question or its answer"

    def find(self, wanted: str) -> tuple[Sequence[tuple[tuple[int, str], Content]], int]:
        lines = [((hit.place, wanted), _line(hit)) for hit in find(self._turns, wanted)]
        places = [place for (place, _), _ in lines]
        return lines, places.index(self._marked) if self._marked in places else len(places) - 1


def _line(hit: Hit) -> Content:
    number = (f"{hit.place + 1:>3}  ", "dim")
    if not hit.word:
        return Content.assemble(number, hit.question)
    excerpt = ((f"\n     {hit.before}", "dim"), (hit.word, "bold"), (hit.after, "dim"))
    return Content.assemble(number, hit.question, *excerpt)
