"""The bench's prompts as word numbers, and how these become request bodies.

A dataset yields word numbers; the same seed gives the same numbers. For completions they become
token ids of the server's own tokenizer, so that prompt lengths are exact; for chats, and for
servers that cannot tokenise, English words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WORDS: tuple[str, ...] = tuple(
    """
the of and to in is was for that on as with by are at from his it an be this which or had not but
one have were their has its first also after who been other they two her she all there when more
would about time if out up into some year only no new may over most people than between will then
so these him many such can school during made city where later while through used state use both
being became known under part well work years named world end name any life since number called
war before around second high until house long game south north team day music found group old
play set line home place great left general early form book public film best house right water
back down without large came did own company small country family another within system member
still area following several man because same won high won point order power include case much
local open take program level off based students get field land service street air law main west
like even head way song light government history church king body night court century million
road market body river common river force lead young action figure class single member women men
cause short event version story report party third building record track live change final half
sea total good given further age present process held side army support late last village human
run against science again often produce next design original central position station section
modern research room free white black green blue red black control cover term word page letter
front simple clear market value table summer winter morning paper stone bridge garden window
machine engine memory model token answer question reason result measure number moment
""".split()
)
"""A few words are repeated, which does no harm."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: word numbers, or the user's own text."""

    role: str
    words: tuple[int, ...] = ()
    text: str | None = None

    def as_text(self) -> str:
        if self.text is not None:
            return self.text
        return " ".join(WORDS[w % len(WORDS)] for w in self.words)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a dataset."""

    turns: tuple[Turn, ...]
    output_len: int
    at_s: float | None = None
    """Send time in a trace, from the trace's start."""
    is_chat: bool = False
    """A conversation; the completions endpoint gets it as a script with role names."""

    @property
    def num_words(self) -> int:
        """Approximate number of tokens; 0 for the user's own text."""
        return sum(len(t.words) for t in self.turns)


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes the JSON body of each request."""

    model: str
    is_chat: bool
    token_pool: Sequence[int] = ()
    """Token ids of the server's tokenizer that stand for words; empty: it cannot tokenise."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields that every request gets."""

    def body(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            body["messages"] = [{"role": t.role, "content": t.as_text()} for t in prompt.turns]
            body["max_completion_tokens"] = prompt.output_len
        else:
            body["prompt"] = self._completion_prompt(prompt)
            body["max_tokens"] = prompt.output_len
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {**body, **stream, **self.fields}

    def _completion_prompt(self, prompt: Prompt) -> str | list[int]:
        if self.token_pool and all(t.text is None for t in prompt.turns):
            pool, size = self.token_pool, len(self.token_pool)
            return [pool[w % size] for t in prompt.turns for w in t.words]
        if not prompt.is_chat:
            return "".join(t.as_text() for t in prompt.turns)
        script = [f"{t.role.capitalize()}: {t.as_text()}\n" for t in prompt.turns]
        return "".join(script) + "Assistant:"
