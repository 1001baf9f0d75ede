"""Where a chat's prompt and those of other turns part: see `TurnEnds`.

Templates differ in all but this: a turn begins with a control token that only the template writes,
and the generation prompt begins with the same. So the chat is rendered without its generation
prompt, up to the last question, and with another first message; each shows a place where texts
part, and the control token there its position. Rendering takes a few percent of the time of
tokenising. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from termgen.vocabulary.request import TurnEnds

OTHER_TEXT = "\ue000"
"""The first message of another conversation."""
PIECE_CHARS = 2**16
"""Texts are compared in pieces of this length."""


class Mark(NamedTuple):
    """A control token that the template has written."""

    token_id: int
    start: int
    end: int
    """Its place in the rendered text."""
    position: int
    """In the prompt's tokens."""


def other_conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of another conversation with the same system prompt."""
    first = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    return [*map(dict, messages[:first]), {"role": "user", "content": OTHER_TEXT}]


def up_to_question(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages up to the last of a user, if others follow; else none."""
    behind = 0
    while behind < len(messages) and messages[-1 - behind]["role"] != "user":
        behind += 1
    return [dict(one) for one in messages[: len(messages) - behind]] if behind else []


def turn_ends(
    text: str, marks: Sequence[Mark], *, bare: str, question: str, other: str
) -> TurnEnds:
    """The turns' ends in a rendered chat.

    marks: in order. bare: the chat without its generation prompt. question: the chat up to its last
    question, which is not the last message. other: another conversation with the same system prompt
    and tools. An empty text: there is none.
    """
    begins = num_shared(text, bare) or len(text)
    opening = next((i for i, mark in enumerate(marks) if mark.start >= begins), None)
    last = previous = 0
    if opening is not None:
        last, opener = marks[opening].position, marks[opening].token_id
        earlier = (mark.position for mark in reversed(marks[:opening]) if mark.token_id == opener)
        previous = next(earlier, 0)
    return TurnEnds(
        last=last,
        question=_end_before(marks, num_shared(text, question)),
        previous=previous,
        system=_end_before(marks, num_shared(text, other)),
    )


def _end_before(marks: Sequence[Mark], place: int) -> int:
    """Tokens up to the last mark that ends at or before a place of the text."""
    return next((mark.position + 1 for mark in reversed(marks) if mark.end <= place), 0)


def num_shared(one: str, other: str) -> int:
    """Characters with which both texts begin."""
    end = min(len(one), len(other))
    start = 0
    while start < end and one[start : start + PIECE_CHARS] == other[start : start + PIECE_CHARS]:
        start += PIECE_CHARS
    start, stop = min(start, end), min(start + PIECE_CHARS, end)
    while start < stop:  # halve the piece that differs
        middle = (start + stop + 1) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            stop = middle - 1
    return start
