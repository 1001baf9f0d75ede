"""Token ids to visible text, one token at a time.

Three layers, each usable alone: a `TokenDecoder` turns ids into whole characters; a `StopAutomaton`
finds stop strings across token boundaries; a `Detokenizer` combines the two for one request. The
concatenated results of `push` and `finish` equal a one-shot decode of the same ids, cut at the
first stop string. Called by the output processor; knows nothing of requests, slots or steps.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_WINDOW_TOKENS = 32
"""A character spans at most four tokens, so replacement characters in a longer window are final:
the model did write invalid UTF-8."""


class TokenDecoder(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """Characters completed by this token."""
        ...

    def flush(self) -> str:
        """The rest at the end: replacement characters for an incomplete character."""
        ...


class BytesDecoder:
    """Decoder for vocabularies of byte strings: byte-level BPE, or byte fallback.

    Exact by construction: the bytes are those of the full decode, and an incremental UTF-8 decoder
    replaces invalid sequences exactly as a one-shot decoder does.
    """

    __slots__ = ("_at_start", "_bytes_of", "_pending")

    def __init__(self, bytes_of: Mapping[int, bytes], *, strip_leading_space: bool = False) -> None:
        self._bytes_of = bytes_of
        self._pending = b""
        """First bytes of an incomplete character."""
        self._at_start = strip_leading_space

    def push(self, token_id: int) -> str:
        return self._decode(self._pending + self._bytes_of[token_id], final=False)

    def flush(self) -> str:
        return self._decode(self._pending, final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return self._strip(text) if self._at_start and text else text

    def _strip(self, text: str) -> str:
        self._at_start = False
        return text[1:] if text[0] == " " else text


class WindowDecoder:
    """Decoder for all other vocabularies: decodes a short window of ids and emits its new text.

    The tokenizer may treat the first token of a text specially (strip a space), so the window
    starts one emission before the new tokens and the text emitted before is cut off.
    """

    __slots__ = ("_decode", "_emitted", "_ids", "_new_start", "_seen", "_window_start")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._emitted: list[str] = []
        self._window_start = 0
        self._new_start = 0
        self._seen = ""
        """Decode of ids[window_start:new_start], emitted already."""

    def push(self, token_id: int) -> str:
        ids = self._ids
        ids.append(token_id)
        window = self._decode(ids[self._window_start :])
        if len(window) <= len(self._seen):
            return ""
        held = len(ids) - self._new_start
        if window.endswith(REPLACEMENT) and held <= MAX_WINDOW_TOKENS:
            return ""
        text = window[len(self._seen) :]
        self._window_start, self._new_start = self._new_start, len(ids)
        self._seen = self._decode(ids[self._window_start :])
        self._emitted.append(text)
        return text

    def flush(self) -> str:
        # A full decode corrects what a window cannot determine.
        return self._decode(self._ids)[sum(map(len, self._emitted)) :]


class StopAutomaton:
    """Aho-Corasick automaton over stop strings: one state instead of searching back in the text.

    Immutable and shared by all completions of a request. State 0 is the root. `depth[state]` is
    the number of characters that could still become a stop string, so exactly those are held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.first_chars = frozenset(s[0] for s in stops)
        self._edges: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        """Longest stop string that ends in this state."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._edges[state].get(char)
            if following is None:
                following = len(self._edges)
                self._edges[state][char] = following
                self._edges.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._edges[state].items():
                self._fail[following] = self.step(self._fail[state], char)
                queue.append(following)
            if self.match[state] is None:
                self.match[state] = self.match[self._fail[state]]

    def step(self, state: int, char: str) -> int:
        while state and char not in self._edges[state]:
            state = self._fail[state]
        return self._edges[state].get(char, 0)

    def after_match(self, state: int) -> int:
        """The state after an ignored match: a complete stop string holds nothing back."""
        while state and not self._edges[state]:
            state = self._fail[state]
        return state


class Detokenizer:
    """Text of one completion: decodes, holds back possible stop strings, stops at the first.

    Cost per token depends on the token's own text, never on the length of the output.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_state",
        "_stops",
        "num_tokens",
        "stop",
    )

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        stops: StopAutomaton | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""
        self.num_tokens = 0
        self.stop: str | None = None
        """The stop string that ended the text."""

    def push(self, token_id: int) -> str:
        """Text that can be shown now. Not to be called again once `stop` is set."""
        assert self.stop is None, "push after a stop string"
        self.num_tokens += 1
        text = self._decoder.push(token_id)
        if self._stops is None or not text:
            return text
        if self._state == 0 and self._stops.first_chars.isdisjoint(text):
            return text
        return self._scan(self._stops, text)

    def finish(self) -> str:
        """The text still held back, for an end other than by a stop string."""
        if self.stop is not None:
            return ""
        text = self._held + self._decoder.flush()
        self._held, self._state = "", 0
        return text

    def _scan(self, stops: StopAutomaton, new: str) -> str:
        # Invariant: `held` is the text of the automaton's state, so len(held) == depth[state].
        text = self._held + new
        state = self._state
        counts = self.num_tokens >= self._min_tokens
        for end, char in enumerate(new, start=len(self._held) + 1):
            state = stops.step(state, char)
            match = stops.match[state]
            if match is None:
                continue
            if counts:
                self.stop = match
                self._held = ""
                return text[: end if self._include_stop else end - len(match)]
            state = stops.after_match(state)
        self._state = state
        shown = len(text) - stops.depth[state]
        self._held = text[shown:]
        return text[:shown]
