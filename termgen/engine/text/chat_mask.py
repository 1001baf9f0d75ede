"""Replaces characters in what clients wrote in a chat, length for length, and undoes it.

Shows which characters of a rendered chat come from a client: see chat_encoding.py. Knows no
tokens and no templates.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from termgen.engine.text.chat_messages import REASONING_FIELDS

UNMASKABLE = frozenset('"\\')
"""Serialising to JSON escapes these, so replacing them would change lengths."""

PIECE_CHARS = 2**14
"""Characters of a piece of a long text; the GIL is held until a piece is done."""

Table = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Chat:
    """A checked conversation, ready to be rendered."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool
    continued: str | None
    """Character that marks the end of the final message, where the prompt is cut."""
    num_chars: int


def strings(value: Any) -> Iterator[str]:
    """Every string in plain data that a client wrote, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def unused_chars(text: str) -> Iterator[str]:
    """Private-use characters that do not occur in `text`."""
    used: set[str] = set()
    for piece in _pieces(text):
        used.update(piece)
    private = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
    return (c for c in map(chr, private) if c not in used)


def _pieces(text: str) -> Iterator[str]:
    return (text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS))


def _translate(text: str, table: Table) -> str:
    return "".join([piece.translate(table) for piece in _pieces(text)])


class Mask:
    """Replaces an alphabet by private characters in what clients wrote, and back."""

    def __init__(
        self,
        alphabet: str,
        punctuation: str,
        kept: re.Pattern[str] | None,
        *,
        avoid: str,
    ) -> None:
        private = unused_chars(avoid)
        self._table: Table = {ord(c): next(private) for c in alphabet}
        # Keys and types steer templates, so only what no identifier contains is masked in them.
        self._key_table: Table = {ord(c): self._table[ord(c)] for c in punctuation}
        self._inverse: Table = {ord(v): chr(k) for k, v in self._table.items()}
        self._kept = kept

    def undo(self, text: str) -> str:
        return _translate(text, self._inverse)

    def shorten(self, text: str) -> tuple[str, Callable[[int], int]]:
        """Each run of masked characters as one, since tokenizers make several tokens of each of
        them; and what tells where a place in that lies in `text`."""
        runs = re.compile("[" + "".join(self._table.values()) + "]{2,}")
        pieces: list[str] = []
        places, lost = [0], [0]  # so much is lost before each place
        end = 0
        for run in runs.finditer(text):
            pieces.append(text[end : run.start() + 1])
            end = run.end()
            lost.append(lost[-1] + len(run[0]) - 1)
            places.append(end - lost[-1])
        pieces.append(text[end:])
        return "".join(pieces), lambda place: place + lost[bisect_right(places, place) - 1]

    def apply(self, chat: Chat) -> Chat:
        return replace(
            chat,
            messages=[self._message(m) for m in chat.messages],
            variables=self._value(chat.variables, self._table),
        )

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        own_words = message["role"] == "assistant"
        for key, value in message.items():
            if key == "role":  # checked against a fixed list
                out[key] = value
            elif own_words and isinstance(value, str) and key in ("content", *REASONING_FIELDS):
                out[key] = self._own(value)
            else:
                out[key.translate(self._key_table)] = self._value(value, self._table)
        return out

    def _own(self, text: str) -> str:
        if self._kept is None:
            return _translate(text, self._table)
        parts = self._kept.split(text)  # odd parts are the matches
        return "".join(p if i % 2 else _translate(p, self._table) for i, p in enumerate(parts))

    def _value(self, value: Any, table: Table) -> Any:
        if isinstance(value, str):
            return _translate(value, table)
        if isinstance(value, list):
            return [self._value(item, table) for item in value]
        if isinstance(value, dict):
            return {
                k.translate(self._key_table): self._value(
                    v, self._key_table if k == "type" else table
                )
                for k, v in value.items()
            }
        return value


def alphabets(contents: list[str]) -> tuple[str, str]:
    """Characters to mask: all that control tokens are made of, and a set without letters.

    The second leaves words alone, for templates that look for some; it still has at least one
    character of every control token.
    """
    letters: set[str] = set()
    punctuation: set[str] = set()
    for content in contents:
        usable = [c for c in content if not c.isspace() and c not in UNMASKABLE]
        letters.update(usable)
        marks = [c for c in usable if not c.isalnum() and c != "_"]
        punctuation.update(marks or usable)
    return "".join(sorted(letters)), "".join(sorted(punctuation))
