"""A request's deltas on their way to one reader, merged while the reader is behind."""

from __future__ import annotations

import asyncio

from termgen.client import TokenDelta, merge_deltas
from termgen.errors import EngineDeadError

MERGE_AT = 64
"""Merging copies all tokens that wait, so it is not done for every single one."""


class DeltaStream:
    """What waits is bounded by the request itself, and is merged into few deltas.

    `push` never waits, so a slow reader gets larger deltas instead of holding anybody up. Event
    loop only.
    """

    def __init__(self, num_completions: int) -> None:
        self._waiting: dict[int, list[TokenDelta]] = {}
        """By completion."""
        self._open = num_completions
        self._news = asyncio.Event()
        self._error: EngineDeadError | None = None

    def push(self, delta: TokenDelta) -> None:
        waiting = self._waiting.setdefault(delta.index, [])
        waiting.append(delta)
        if len(waiting) >= MERGE_AT:
            waiting[:] = [merge_deltas(waiting)]
        self._news.set()

    def fail(self, error: EngineDeadError) -> None:
        """End the stream with an error, after what is still waiting."""
        self._error = error
        self._news.set()

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._waiting:
            if not self._open:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error.again()
            self._news.clear()
            await self._news.wait()
        index = next(iter(self._waiting))
        delta = merge_deltas(self._waiting.pop(index))
        if delta.finish_reason is not None:
            self._open -= 1
        return delta
