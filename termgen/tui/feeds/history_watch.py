"""The last hour of an engine in this process, also while its dashboard is hidden."""

from __future__ import annotations

import asyncio

from termgen.tui.feeds.feed import EngineFeed
from termgen.vocabulary.engine_history import EngineHistory

READ_S = 1.0
CAPACITY = 16_384
"""More events than the quickest engine publishes between two readings."""


class HistoryWatch:
    """Reads an engine's events once a second until `close`. Needs a running event loop."""

    def __init__(self, client: EngineFeed) -> None:
        self.history = EngineHistory()
        self._client = client
        self._ring = client.events(CAPACITY)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(READ_S, self._tick)

    def read(self) -> None:
        """Count what has happened by now."""
        self.history.add(self._ring.drain())

    def close(self) -> None:
        """Stop listening. May be called again."""
        self._timer.cancel()
        self._client.close_events(self._ring)

    def _tick(self) -> None:
        self.read()
        self._timer = self._loop.call_later(READ_S, self._tick)
