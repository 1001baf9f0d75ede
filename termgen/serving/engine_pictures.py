"""The engine's state for all who listen: asked for once, encoded once, however many look.

Building a snapshot is the engine's time. Lives on the event loop; used by `/v1/events`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from termgen.client import EngineClient
from termgen.errors import EngineError
from termgen.vocabulary.events import EngineSnapshot
from termgen.vocabulary.telemetry import encode_snapshot

SNAPSHOT_TIMEOUT_S = 1.0


class Picture:
    """One snapshot, and its bytes when somebody wants them."""

    def __init__(self, snapshot: EngineSnapshot) -> None:
        self.snapshot = snapshot
        self.taken_at = time.monotonic()

    @cached_property
    def encoded(self) -> bytes:
        return encode_snapshot(self.snapshot)

    def shows_as(self, other: Picture | None) -> bool:
        """Whether only time has passed between the two."""
        return other is self or (other is not None and _same(self.snapshot, other.snapshot))


class Pictures:
    """Of one engine."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._newest: Picture | None = None
        self._asking: asyncio.Task[Picture | None] | None = None

    async def look(self, max_age_s: float = 0.0) -> Picture | None:
        """A picture at most so old; None when the engine does not answer."""
        newest = self._newest
        if newest is not None and time.monotonic() - newest.taken_at < max_age_s:
            return newest
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)  # others may wait for it too

    def forget(self) -> None:
        self._newest = None

    async def _ask(self) -> Picture | None:
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                self._newest = Picture(await self._engine.snapshot())
                return self._newest
        return None


def _same(new: EngineSnapshot, old: EngineSnapshot) -> bool:
    """The cheapest first: while anything runs, one of the counts tells already."""
    others = type(new).__dataclass_fields__.keys() - {
        "time_ns",
        "requests",
        "block_states",
        "block_owners",
        "evicted_blocks",
        "cpu_s",
        "resident_bytes",
    }
    if any(getattr(new, name) != getattr(old, name) for name in others):
        return False
    if len(new.requests) != len(old.requests) or any(
        replace(one, age_s=other.age_s) != other
        for one, other in zip(new.requests, old.requests, strict=True)
    ):
        return False
    return not (
        (new.block_states != old.block_states).any() or (new.block_owners != old.block_owners).any()
    )
