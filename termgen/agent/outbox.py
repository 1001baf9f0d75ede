"""Updates of one session, sent in their order by one task.

The session puts them in and goes on; pieces of text that wait for the client become one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from acp.helpers import update_agent_message_text, update_agent_thought_text

from termgen.tui.chat.saved.chat_records import plain_text

MOST_CHARS = 100_000
"""Text that may wait for the client, before the answer is held up."""

Send = Callable[[Any], Awaitable[None]]


class Outbox:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[Any] = deque()
        """Updates, and texts as (their maker, pieces)."""
        self._num_chars = 0
        self._pump: asyncio.Task[None] | None = None

    def put(self, update: Any) -> None:
        self._waiting.append(update)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._pumping())

    def say(self, text: str) -> None:
        """A piece of the answer."""
        self._put_text(update_agent_message_text, text)

    def think(self, text: str) -> None:
        """A piece of the thoughts."""
        self._put_text(update_agent_thought_text, text)

    def _put_text(self, make: Callable[[str], Any], text: str) -> None:
        if not text:
            return
        self._num_chars += len(text)
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, tuple) and last[0] is make:
            last[1].append(text)
        else:
            self.put((make, [text]))

    async def room(self) -> None:
        """Wait while too much text waits."""
        if self._num_chars > MOST_CHARS:
            await self.flush()

    async def flush(self) -> None:
        """Wait until all is sent, or cannot be."""
        while self._pump is not None and not self._pump.done():
            await asyncio.wait([self._pump])

    async def _pumping(self) -> None:
        while self._waiting:
            update = self._waiting.popleft()
            if isinstance(update, tuple):
                make, pieces = update
                text = "".join(pieces)
                self._num_chars -= len(text)
                update = make(plain_text(text))
            try:
                await self._send(update)
            except ConnectionError:  # the client has gone, and the program ends
                self._waiting.clear()
                self._num_chars = 0
