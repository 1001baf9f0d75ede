"""One history of engine events for all listeners over HTTP, and snapshots of the engine's state.

Events are numbered and kept in one bounded history; a listener is a number in it, so a slow one
costs nothing and loses the oldest first. A listener that reconnects goes on where it was. The hub
listens from the server's start, so that one who comes later can begin with what has happened, and
keeps the last hour in coarse figures. Lives on the event loop: events are moved once a second, and
when listeners read.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from termgen.client import AdminClient
from termgen.errors import EngineError, OverloadedError
from termgen.system.gpu_meter import GpuWatch
from termgen.vocabulary.engine_history import EngineHistory, HistoryState
from termgen.vocabulary.events import EngineEvent, EngineSnapshot, EventRing
from termgen.vocabulary.telemetry import encode_snapshot

SNAPSHOT_TIMEOUT_S = 1.0

HISTORY = 16_384
"""Events kept, at most 30 MB: half a minute of a busy GPU, hours of an idle one."""
MOVE_S = 1.0

MAX_LISTENERS = 8
RETRY_AFTER_S = 5.0
"""Listeners stay long: the server cannot know when one goes."""

MAX_BATCH = 4096
"""Limit for the events of one frame."""


class EncodedSnapshot:
    """One snapshot, and its bytes once a listener needs them."""

    def __init__(self, snapshot: EngineSnapshot) -> None:
        self.snapshot = snapshot
        self.taken_at = time.monotonic()

    @cached_property
    def encoded(self) -> bytes:
        return encode_snapshot(self.snapshot)

    def shows_as(self, other: EncodedSnapshot | None) -> bool:
        """True if only time has passed between the two."""
        return other is self or (other is not None and _same(self.snapshot, other.snapshot))


class Snapshots:
    """Snapshots of one engine, shared by its listeners."""

    def __init__(self, engine: AdminClient) -> None:
        self._engine = engine
        self._newest: EncodedSnapshot | None = None
        self._asking: asyncio.Task[EncodedSnapshot | None] | None = None

    async def look(self, max_age_s: float = 0.0) -> EncodedSnapshot | None:
        """A snapshot at most this old; None when the engine does not answer."""
        newest = self._newest
        if newest is not None and time.monotonic() - newest.taken_at < max_age_s:
            return newest
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)  # others may wait for it too

    def forget(self) -> None:
        self._newest = None

    async def _ask(self) -> EncodedSnapshot | None:
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                self._newest = EncodedSnapshot(await self._engine.snapshot())
                return self._newest
        return None


def _same(new: EngineSnapshot, old: EngineSnapshot) -> bool:
    """Compare two snapshots, the cheapest fields first: while anything runs, one of the counts
    differs."""
    others = type(new).__dataclass_fields__.keys() - {
        "time_ns",
        "requests",
        "block_states",
        "block_owners",
        "block_groups",
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
        (new.block_states != old.block_states).any()
        or (new.block_owners != old.block_owners).any()
        or (new.block_groups != old.block_groups).any()
    )


# -- events --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)  # two listeners may be at the same place
class Listener:
    """One listener's place: the number of the newest event it has."""

    cursor: int
    dropped: int = 0
    """Events it was too slow for, since it began."""


class EventHub:
    """The events of one engine."""

    def __init__(self, engine: AdminClient) -> None:
        self._engine = engine
        self._listeners: list[Listener] = []
        self._history: deque[EngineEvent] = deque(maxlen=HISTORY)
        self._newest = 0
        """The number of the newest event; the first one has 1."""
        self._ring: EventRing | None = engine.events(HISTORY)
        self._num_lost = 0
        self._past = EngineHistory()
        self.num_dropped = 0
        """Events that listeners were too slow for, over all listeners."""
        self.snapshots = Snapshots(engine)
        """The state of the engine, for the listeners."""
        self.gpu = GpuWatch(engine.model.device)
        """Figures of the engine's GPU, read while anything listens."""
        self._gpu_watching: asyncio.Task[None] | None = None
        self.stream = secrets.token_hex(4)
        """Name of this numbering."""
        self.closing = asyncio.Event()
        """Set when the server is about to stop."""
        self._timer: asyncio.TimerHandle | None = None

    def follow(self) -> None:
        """Move the events once a second from now on."""
        self._move()
        if not self.closing.is_set():
            self._timer = asyncio.get_running_loop().call_later(MOVE_S, self.follow)

    def join(
        self, last_seen: tuple[str, int] | None, *, past: bool = False
    ) -> tuple[Listener, bool]:
        """A listener, and whether it continues after the event it saw last. past: one that does not
        begins with the oldest event kept. Raises OverloadedError."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise OverloadedError(
                f"{MAX_LISTENERS} clients listen already; close one of them",
                code="too_many_listeners",
                retry_after_s=RETRY_AFTER_S,
            )
        self._move()
        resumes = last_seen is not None and last_seen[0] == self.stream
        cursor = self._newest - len(self._history) if past else self._newest
        if last_seen is not None and resumes:
            cursor = min(last_seen[1], self._newest)
        listener = Listener(cursor)
        self._listeners.append(listener)
        if self._gpu_watching is None:
            self._gpu_watching = asyncio.create_task(self.gpu.follow())
        return listener, resumes

    def leave(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        if not self._listeners:
            self.snapshots.forget()
            self._end_gpu_watch()

    def num_behind(self, listener: Listener) -> int:
        """Events that have happened and the listener has not read."""
        return self._newest - listener.cursor

    def past(self) -> HistoryState:
        """The last hour up to the newest event that was read."""
        return self._past.state()

    def read(self, listener: Listener) -> tuple[int, list[EngineEvent]]:
        """Events that are new to a listener, at most `MAX_BATCH`, and the number of the first of
        these."""
        self._move()
        oldest = self._newest - len(self._history)
        if listener.cursor < oldest:
            listener.dropped += oldest - listener.cursor
            self.num_dropped += oldest - listener.cursor
            listener.cursor = oldest
        behind = self._newest - listener.cursor
        # From the new end: new events are few, and far from the old end.
        newest_first = itertools.islice(reversed(self._history), max(0, behind - MAX_BATCH), behind)
        events = list(newest_first)[::-1]
        first = listener.cursor + 1
        listener.cursor += len(events)
        return first, events

    def close(self) -> None:
        """End every stream."""
        self.closing.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._ring is not None:
            self._engine.close_events(self._ring)
            self._ring = None
        self._history.clear()
        self.snapshots.forget()
        self._end_gpu_watch()

    def _end_gpu_watch(self) -> None:
        watching, self._gpu_watching = self._gpu_watching, None
        if watching is not None:
            watching.cancel()

    def _move(self) -> None:
        if self._ring is None:
            return
        events = self._ring.drain()
        lost, self._num_lost = self._ring.num_dropped - self._num_lost, self._ring.num_dropped
        if lost:
            # They came before those that are left: numbers stay in step with the history only if
            # it begins anew behind the gap.
            self._newest += lost
            self._history.clear()
        self._history.extend(events)
        self._past.add(events)
        self._newest += len(events)
