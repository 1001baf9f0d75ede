"""The token ids of answers of this run: what an answer really was, which its text does not tell.

The dialogue fills it as deltas arrive, and forgets it when another model answers. Bounded; saved
chats do not hold it. No Textual.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from termgen.client import TokenDelta

MAX_IDS = 250_000
"""Of all answers together; the newest is kept whatever its length."""


@dataclass(frozen=True, slots=True)
class WrittenTokens:
    prompt_ids: Sequence[int]
    answer_ids: list[int] = field(default_factory=list)
    """All that the model wrote, thoughts and the token that ended it included."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


class TokenBook:
    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._max_ids = max_ids
        self._written: OrderedDict[str, WrittenTokens] = OrderedDict()

    def take(self, turn_id: str, delta: TokenDelta) -> None:
        """Of an answer whose prompt's ids are never told, nothing is kept."""
        if delta.prompt_token_ids is not None:
            self._written[turn_id] = WrittenTokens(delta.prompt_token_ids)
            self._make_room()
        written = self._written.get(turn_id)
        if written is not None:
            written.answer_ids.extend(delta.token_ids)

    def get(self, turn_id: str) -> WrittenTokens | None:
        return self._written.get(turn_id)

    def clear(self) -> None:
        self._written.clear()

    def _make_room(self) -> None:
        num_ids = sum(map(len, self._written.values()))
        while num_ids > self._max_ids and len(self._written) > 1:
            num_ids -= len(self._written.popitem(last=False)[1])
