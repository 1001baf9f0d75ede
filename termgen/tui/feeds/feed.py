"""Sources of a dashboard's events: the part of `EngineClient` that it needs, and what is added when
the engine is remote (`attach`) or recorded (`replay`)."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from termgen.client import ModelInfo
from termgen.errors import EngineError
from termgen.vocabulary.device.gpu_reading import READINGS_KEPT, GpuHistory, GpuReading
from termgen.vocabulary.engine_history import EngineHistory, HistoryState
from termgen.vocabulary.events import EngineSnapshot, EventBus, EventRing
from termgen.vocabulary.telemetry import Cache, Events, Gpu, Message, Opening

PASSED_KEPT = 64
"""Snapshots that wait for a screen that is hidden."""


class EngineFeed(Protocol):
    """The methods that a dashboard needs; every `EngineClient` has them."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def is_healthy(self) -> bool: ...

    async def snapshot(self) -> EngineSnapshot: ...

    def events(self, capacity: int = 4096) -> EventRing: ...

    def close_events(self, ring: EventRing) -> None: ...


class StreamFeed:
    """An `EngineFeed` made of the messages of an event stream, live or recorded."""

    def __init__(self, opening: Opening) -> None:
        self._bus = EventBus()
        self._snapshot: EngineSnapshot | None = None
        self._passed: deque[EngineSnapshot] = deque(maxlen=PASSED_KEPT)
        """Snapshots that were passed on since `drain_snapshots`."""
        self.begun: EngineSnapshot | None = None
        """The state before the first event of this epoch, if it was sent."""
        self._awaits_past = False
        """The events that come are older than the snapshot, which is held back until then."""
        self.history = EngineHistory()
        """The last hour, in coarse figures."""
        self._gpu: deque[GpuReading] = deque(maxlen=READINGS_KEPT)
        self.stream = ""
        self.opening = opening
        self.model = opening.model
        self.status = opening.status
        self.num_dropped = 0
        """Events the sender had to drop."""
        self.epoch = 0
        """Counts how often the past was replaced: what was drawn so far means nothing then."""

    @property
    def trouble(self) -> str:
        """Why nothing new comes, in a few words; empty while all is well."""
        return "engine stopped" if self.status == "engine_dead" else ""

    @property
    def is_healthy(self) -> bool:
        return not self.trouble

    @property
    def gpu_history(self) -> GpuHistory:
        """Figures of the engine's GPU; empty where the sender has none."""
        return tuple(self._gpu)

    def now_ns(self) -> int:
        """The time now by the clock of the events."""
        raise AssertionError("the feed says what time it is")

    async def snapshot(self) -> EngineSnapshot:
        if self._snapshot is None or self._awaits_past:
            raise EngineError("the engine has not reported its state yet")
        return self._snapshot

    def drain_snapshots(self) -> list[EngineSnapshot]:
        """Every snapshot since the last call, oldest first, for looking back: a frame of the screen
        shows the newest alone."""
        passed = list(self._passed)
        self._passed.clear()
        return passed

    def events(self, capacity: int = 4096) -> EventRing:
        return self._bus.subscribe(capacity)

    def close_events(self, ring: EventRing) -> None:
        self._bus.unsubscribe(ring)

    async def close(self) -> None:
        """Nothing is to come any more. May be called again."""

    def take(self, message: Message) -> None:
        """Pass one message on."""
        if isinstance(message, Events):
            self.num_dropped = message.dropped
            for event in message.events:
                self._bus.publish(event)
            self.history.add(message.events)
        elif isinstance(message, HistoryState):
            self.history.restore(message)
            self._awaits_past = False
        elif isinstance(message, Cache):
            self._snapshot, self._awaits_past = message.snapshot, False
            self._passed.append(message.snapshot)
        elif isinstance(message, Gpu):
            newest = self._gpu[-1].time_ns if self._gpu else 0  # a sender may repeat some
            self._gpu += [reading for reading in message.readings if reading.time_ns > newest]
        else:
            self.model, self.status = message.model, message.status
            if isinstance(message, Opening):
                self._open(message)

    def _open(self, opening: Opening) -> None:
        if opening.stream != self.stream:
            self.epoch += bool(self.stream)
            self._awaits_past = opening.num_past > 0
            # A state that is newer than the events to come would be taken for the one before them.
            self._snapshot, self.begun = None, None if self._awaits_past else opening.snapshot
            self._passed.clear()
            self._gpu.clear()
            self.history = EngineHistory()
        self.stream, self.opening = opening.stream, opening
        self.num_dropped = opening.dropped
        self._snapshot = opening.snapshot or self._snapshot
