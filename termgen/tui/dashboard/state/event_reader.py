"""EventReader: the engine's events into a `DashboardStore`, once for each frame of the dashboard.

Drains the event ring and asks for snapshots; another engine, or a recording that is turned back,
begins another store. Draws nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from termgen.errors import EngineError
from termgen.tui.dashboard.state.log import LogTap
from termgen.tui.dashboard.state.store import DashboardStore
from termgen.tui.feeds.feed import EngineFeed, StreamFeed
from termgen.tui.feeds.history_watch import HistoryWatch
from termgen.tui.feeds.replay import ReplayFeed
from termgen.vocabulary.events import EngineEvent

IDLE_SNAPSHOT_S = 2.0
SNAPSHOT_S = 1.0
"""An engine that does not answer must not hold up the picture that says so."""
RING_CAPACITY = 4096
STREAM_CAPACITY = 32_768
"""More than a server keeps: a stream may begin with all of it."""
EVENTS_KEPT = 8192
"""Events for a trace: one and a half minutes at 90 steps a second, some 12 MB."""
REPLAY_CAPACITY = 65_536
"""More than a part of a recording: none of its events is lost here."""


class EventReader:
    """The reader of one dashboard."""

    def __init__(self, client: EngineFeed, now_ns: Callable[[], int]) -> None:
        self._client = client
        self._now_ns = now_ns
        self._stream = client if isinstance(client, StreamFeed) else None
        self.replay = client if isinstance(client, ReplayFeed) else None
        self._epoch = self._stream.epoch if self._stream else 0
        self._watch = HistoryWatch(client) if self._stream is None else None
        self._ring = client.events(self._capacity)
        self.events: deque[EngineEvent] = deque(maxlen=EVENTS_KEPT)
        """The newest events as they came."""
        self.store = self._new_store()
        self._asked_ns = 0
        self._was_idle = False
        self._tap = LogTap() if self._stream is None else None
        """Lines of this process's log; None for a remote engine, whose log is elsewhere."""

    @property
    def _capacity(self) -> int:
        if self.replay is not None:
            return REPLAY_CAPACITY
        return RING_CAPACITY if self._stream is None else STREAM_CAPACITY

    @property
    def trouble(self) -> str:
        """The engine's fault; empty while it is healthy."""
        if self._client.is_healthy:
            return ""
        return (self._stream.trouble if self._stream else "") or "engine stopped"

    def close(self) -> None:
        """Stop listening."""
        self._client.close_events(self._ring)
        if self._watch is not None:
            self._watch.close()
        if self._tap is not None:
            self._tap.close()

    async def take(self) -> bool:
        """Everything that has happened by now. Whether anything has.

        A long part of a recording is taken bit by bit, and the event loop gets its turn between.
        """
        came = False
        while self.replay is not None and self.replay.advance():
            came |= self._drain()
            await asyncio.sleep(0)
        return self._drain() or came

    def turn(self, by_ns: int) -> None:
        """Turn the recording; what is to be played for it comes with the next `take`."""
        assert self.replay is not None
        self._ring.drain()
        self.replay.seek(by_ns)
        self._drain()

    def _drain(self) -> bool:
        events = self._ring.drain()
        lost = 0 if self.replay else self._ring.num_dropped
        if self._stream is not None:
            lost += self._stream.num_dropped
            if self._stream.epoch != self._epoch:  # another engine, or another past
                self._epoch = self._stream.epoch
                self.store = self._new_store()
                self._was_idle = False
        self.store.num_dropped = lost
        self.store.apply(events)
        self.events.extend(events)
        for snapshot in self._stream.drain_snapshots() if self._stream is not None else ():
            self.store.keep_snapshot(snapshot)
        lines = self._tap.drain() if self._tap is not None else []
        for line in lines:
            self.store.log.add(line)
        return bool(events or lines)

    def _new_store(self) -> DashboardStore:
        """A new store that knows the requests which began before the events."""
        self.events.clear()
        model = self._client.model
        source = self._watch or self._stream
        assert source is not None, "the one or the other"
        store = DashboardStore(
            started_ns=self._now_ns(),
            on_cpu=model.device == "cpu",
            num_cores=model.num_cores,
            history=source.history,
        )
        if self._stream is not None and self._stream.begun is not None:
            store.set_snapshot(self._stream.begun)
        return store

    def should_ask(self, came: bool) -> bool:
        """True if a snapshot can have news: an idle engine is rarely asked."""
        waited_s = (self._now_ns() - self._asked_ns) / 1e9
        return came or not self._was_idle or waited_s > IDLE_SNAPSHOT_S

    async def ask(self) -> bool:
        """Fetch a snapshot. Whether there was one."""
        if self._stream is None and not self._client.is_healthy:
            return False  # a stream has the last one
        try:
            async with asyncio.timeout(SNAPSHOT_S):
                snapshot = await self._client.snapshot()
        except (EngineError, TimeoutError):
            return False  # the header and the log page say so
        self._asked_ns = self._now_ns()
        self._was_idle = not snapshot.num_running and not snapshot.num_waiting
        self.store.set_snapshot(snapshot)
        return True
