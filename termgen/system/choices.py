"""The choices of one run of the screens that later runs begin with.

They are read before the first screen, and written in a thread as they change.
"""

from __future__ import annotations

import asyncio
from typing import Any

from termgen.system.remembered import Remembered

MODEL = "model"
"""The model chosen last in a chat with an engine of its own."""
THEME, FEW_COLOURS_THEME = "theme", "theme_of_few_colours"
"""The theme chosen last, and that of terminals with sixteen colours: what suits one kind of
terminal is poor on the other."""
CHATS_OPEN = "chats_open"
"""True if the list of chats was open beside the chat."""
MAX_TEXT_CHARS = 4096


class Choices:
    def __init__(self, remembered: Remembered | None = None) -> None:
        """Without `remembered`, nothing is kept."""
        self._remembered = remembered or Remembered(None)
        self._now = self._remembered.read()
        self.fault = self._remembered.fault
        """Why what was chosen before is not known; empty where it is."""
        self._unwritten: dict[str, Any] = {}
        self._writing = asyncio.Lock()

    @property
    def are_kept(self) -> bool:
        return self._remembered.path is not None

    def text(self, name: str) -> str:
        """A choice that is a text; empty where there is none, or something else stands there."""
        value = self._now.get(name)
        return value if isinstance(value, str) and len(value) <= MAX_TEXT_CHARS else ""

    def is_on(self, name: str) -> bool:
        return self._now.get(name) is True

    def change(self, name: str, value: str | bool) -> None:
        """Take a choice. `write` keeps it."""
        if self._now.get(name) != value:
            self._now[name] = self._unwritten[name] = value

    async def write(self) -> str:
        """Keep what has changed; returns why that failed, or an empty text."""
        async with self._writing:
            changes, self._unwritten = self._unwritten, {}
            if not changes:
                return ""
            await asyncio.to_thread(self._remembered.write, changes)
            return self._remembered.fault
