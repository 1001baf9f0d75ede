"""How much memory large bodies may take together while they arrive and wait to be parsed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from termgen.errors import OverloadedError

SMALL_BODY_BYTES = 2**15
"""Parsed within a millisecond whatever it holds."""
RETRY_AFTER_S = 1.0
"""Most large bodies are parsed within that."""


class BodyRoom:
    """Memory for the large bodies of all requests, from their first byte until they are parsed.
    Small ones always find room: who sends large ones cannot keep others out."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: 0 for no limit."""
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Held by large bodies now."""

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """One body's."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_held

    def take(self, num_bytes: int) -> None:
        """Raises `OverloadedError` where there is no room for these."""
        if self._max_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"Large request bodies hold {self.num_bytes} bytes already, and at most "
                f"{self._max_bytes} may be held; try again in {RETRY_AFTER_S:g} s",
                code="bodies_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_bytes += num_bytes


class BodyShare:
    """What one body holds of the room."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.num_bytes = self.num_held = 0
        """That came, and of these those that are counted."""

    @property
    def is_small(self) -> bool:
        return self.num_bytes <= SMALL_BODY_BYTES

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if not self.is_small:
            self._room.take(self.num_bytes - self.num_held)
            self.num_held = self.num_bytes
