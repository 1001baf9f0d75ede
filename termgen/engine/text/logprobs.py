"""Log-probabilities of a front end: the entries of a step's rows, and those of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from termgen.client import TokenLogprob
from termgen.vocabulary.step import StepLogprobs

if TYPE_CHECKING:
    from termgen.engine.text.tokenizer import Tokenizer


class TokenNames(dict[int, tuple[str, bytes]]):
    """Cache of tokens' text and bytes, as a long prompt repeats many tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> tuple[str, bytes]:
        tokenizer = self._tokenizer
        name = ("", b"")
        if tokenizer is not None:
            name = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        self[token_id] = name
        return name


class _Likeliest(Sequence[tuple[int, str, bytes, float]]):
    """The likeliest tokens of a position, put together when they are read: a step of 256 rows has
    thousands, and the engine waits for who makes them."""

    __slots__ = ("_ids", "_names", "_values")

    def __init__(self, ids: list[int], values: list[float], names: TokenNames) -> None:
        self._ids, self._values, self._names = ids, values, names

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> tuple[int, str, bytes, float]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, str, bytes, float]]: ...

    def __getitem__(
        self, index: int | slice
    ) -> tuple[int, str, bytes, float] | Sequence[tuple[int, str, bytes, float]]:
        if isinstance(index, slice):
            return _Likeliest(self._ids[index], self._values[index], self._names)
        token_id = self._ids[index]
        return token_id, *self._names[token_id], self._values[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class LogprobRows:
    """A step's logprobs as Python lists: one conversion instead of one per element."""

    __slots__ = ("logprobs", "ranks", "token_ids")

    def __init__(self, logprobs: StepLogprobs) -> None:
        self.token_ids: list[list[int]] = logprobs.token_ids.tolist()
        self.logprobs: list[list[float]] = logprobs.logprobs.tolist()
        self.ranks: list[int] = logprobs.ranks.tolist()

    def __len__(self) -> int:
        return len(self.ranks)

    def entries(
        self, names: TokenNames, first: int, count: int, num_top: int
    ) -> tuple[TokenLogprob, ...]:
        """Entries of `count` rows from `first` on, each with the `num_top` likeliest tokens."""
        end = num_top + 1
        found = []
        for row in range(first, first + count):
            ids, values = self.token_ids[row], self.logprobs[row]
            top = _Likeliest(ids[1:end], values[1:end], names) if end > 1 else ()
            found.append(TokenLogprob(ids[0], *names[ids[0]], values[0], self.ranks[row], top))
        return tuple(found)


class PromptScores:
    """Log-probabilities of a prompt's tokens as its chunks are computed.

    After a preemption the prompt is computed again from its start, with the same values.
    """

    __slots__ = ("_entries", "_num_missing", "num_top")

    def __init__(self, num_top: int, num_prompt_tokens: int) -> None:
        self.num_top = num_top
        self._entries: list[TokenLogprob | None] = [None] * num_prompt_tokens
        self._num_missing = num_prompt_tokens

    def put(self, start: int, entries: Sequence[TokenLogprob]) -> None:
        for position, entry in enumerate(entries, start):
            self._num_missing -= self._entries[position] is None
            self._entries[position] = entry

    def take(self) -> tuple[TokenLogprob, ...] | None:
        """All of them, once complete."""
        if self._num_missing:
            return None
        return tuple(entry for entry in self._entries if entry is not None)
