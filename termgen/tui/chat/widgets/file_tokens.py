"""The tokens of files that are to go with a question, counted beside the screen.

An engine of the chat's own counts them, or the server (`/tokenize`), where it is a termgen or a
vLLM on this machine. To any other nothing of a file is sent before the question is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from termgen.client import EngineClient
from termgen.errors import TermgenError
from termgen.tui.chat.state import attachments as files
from termgen.tui.chat.state import documents
from termgen.tui.chat.state.attachments import Attachment

PAUSE_S = 0.3
"""Time without a change of the files before they are counted."""
MOST_KEPT = 200
"""Numbers of files that are remembered."""


class Chip(NamedTuple):
    """A file that is to be sent."""

    name: str
    num_bytes: int
    changed_ns: int = 0
    """When it was last written; 0 for one that is attached already."""
    attached: Attachment | None = None


class FileTokens:
    def __init__(
        self,
        start_worker: Callable[..., object],
        client: Callable[[], EngineClient],
        *,
        on_counted: Callable[[], None],
    ) -> None:
        """start_worker: see `ChatView`."""
        self._start_worker = start_worker
        self._client = client
        self._on_counted = on_counted
        self._known: dict[tuple[str, Chip], int] = {}
        """Tokens of each file, by the model as well; 0 where it cannot be counted."""

    def of(self, chip: Chip) -> int:
        """Tokens that the model reads for it, its name and fence included; 0: not known."""
        return self._known.get((self._client().model.model_id, chip), 0)

    def count(self, chips: Sequence[Chip]) -> None:
        """Have those counted that are not yet, but for documents, which are read when the question
        is sent."""
        client = self._client()
        if not client.model.counts_tokens:
            return
        missing = [
            chip
            for chip in chips
            if (client.model.model_id, chip) not in self._known
            and (chip.attached is not None or not documents.is_unread(chip.name))
        ]
        if missing:
            self._start_worker("file-tokens", self._counting, client, missing, exclusive=True)

    async def _counting(self, client: EngineClient, chips: Sequence[Chip]) -> None:
        await asyncio.sleep(PAUSE_S)
        for chip in chips:
            number = 0
            with suppress(TermgenError):  # the question says why, if it is sent
                file = chip.attached
                if file is None:
                    file = await asyncio.to_thread(files.read_file, chip.name)
                text = files.with_name(file)
                number = len(await client.tokenize(text, add_special_tokens=False))
            while len(self._known) >= MOST_KEPT:
                del self._known[next(iter(self._known))]
            self._known[client.model.model_id, chip] = number
        self._on_counted()
