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
CHATS_COLUMNS = "chats_columns"
"""Width of that list, if the user has changed it."""
MODEL_OF_SERVER = "model of "
"""Begins the name of the choice of a server's model; its URL follows."""
MOST_SERVERS = 50
"""Servers whose models are kept; that of the server whose model was first kept goes."""
MAX_TEXT_CHARS = 4096


def model_choice(server: str = "") -> str:
    """Name of the choice of a model: of an engine of the chat's own, or of the server at a URL."""
    return MODEL_OF_SERVER + server if server else MODEL


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

    def number(self, name: str) -> int:
        """A choice that is a whole number; 0 where there is none above it."""
        value = self._now.get(name)
        return value if type(value) is int and value > 0 else 0

    def change(self, name: str, value: str | int) -> None:
        """Take a choice. `write` keeps it."""
        if self._now.get(name) == value:
            return
        self._now[name] = self._unwritten[name] = value
        servers = [known for known in self._now if known.startswith(MODEL_OF_SERVER)]
        for known in servers[: max(0, len(servers) - MOST_SERVERS)]:
            del self._now[known]
            self._unwritten[known] = None  # removes it

    async def write(self) -> str:
        """Keep what has changed; returns why that failed, or an empty text."""
        async with self._writing:
            changes, self._unwritten = self._unwritten, {}
            if not changes:
                return ""
            await asyncio.to_thread(self._remembered.write, changes)
            return self._remembered.fault
