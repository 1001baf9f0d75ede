"""What the parts of one server share: its engine, its metrics, and which answers are under way."""

from __future__ import annotations

import asyncio
from typing import Protocol

from termgen.api.errors import unavailable
from termgen.api.models import served_names
from termgen.client import EngineClient
from termgen.config import ServerConfig
from termgen.engine.events import EventRing
from termgen.errors import EngineDeadError, EngineError
from termgen.serving.metrics import ServerMetrics

EVENT_RING_CAPACITY = 16_384
SNAPSHOT_TIMEOUT_S = 1.0


class Cancellable(Protocol):
    """An answer under way, as far as stopping the server is concerned."""

    def fail(self, error: Exception) -> None: ...


class ServerState:
    """Owned by the event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: EngineClient | None = None
        self.metrics: ServerMetrics | None = None
        self.is_draining = False
        self._ring: EventRing | None = None
        self._answers: set[Cancellable] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def attach(self, engine: EngineClient) -> None:
        """Begin to serve this engine. Once."""
        assert self.engine is None, "a server has one engine"
        self.metrics = ServerMetrics(self.names_for(engine)[0])
        if engine.model.memory is not None:
            self.metrics.on_memory(engine.model.memory)
        self.metrics.on_startup(engine.model.startup)
        self.metrics.run_ahead.set(engine.model.run_ahead_ms / 1e3)
        self._ring = engine.events(EVENT_RING_CAPACITY)
        self.engine = engine

    def detach(self) -> None:
        """Let go of the engine's events."""
        if self.engine is not None and self._ring is not None:
            self.engine.close_events(self._ring)
            self._ring = None

    def names_for(self, engine: EngineClient) -> tuple[str, ...]:
        return served_names(engine.model, self.config.served_model_name)

    @property
    def status(self) -> str:
        """`ok`, or why new requests are refused: loading, draining, engine_dead."""
        if self.engine is None:
            return "loading"
        if not self.engine.is_healthy:
            return "engine_dead"
        return "draining" if self.is_draining else "ok"

    def require_engine(self) -> EngineClient:
        """The engine, if a new request may be given to it now."""
        status = self.status
        if status == "loading":
            raise unavailable("loading", "The model is still loading; try again soon")
        if status == "engine_dead":
            raise EngineDeadError("The engine has stopped or stands still; see the server's log")
        if status == "draining":
            raise unavailable("draining", "The server is shutting down")
        assert self.engine is not None
        return self.engine

    def require_metrics(self) -> ServerMetrics:
        assert self.metrics is not None, "metrics exist from attach() on"
        return self.metrics

    def drain_events(self) -> None:
        """Feed the metrics with what the engine has published."""
        if self._ring is not None and self.metrics is not None:
            self.metrics.on_events(self._ring.drain(), num_dropped=self._ring.num_dropped)

    async def render_metrics(self) -> bytes:
        """Prometheus text; with an engine that does not answer, what is known of it."""
        if self.engine is None or self.metrics is None:
            return b""
        self.drain_events()
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                self.metrics.on_snapshot(await self.engine.snapshot())
        except (TimeoutError, EngineError):
            pass  # the last step record is the newest state there is
        return self.metrics.render()

    # -- answers under way -----------------------------------------------------------------

    def begin(self, answer: Cancellable) -> None:
        self._answers.add(answer)
        self._is_idle.clear()

    def end(self, answer: Cancellable) -> None:
        self._answers.discard(answer)
        if not self._answers:
            self._is_idle.set()

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything under way ended in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def fail_all(self) -> None:
        """End every answer under way: an error frame in streams, 503 elsewhere."""
        for answer in tuple(self._answers):
            answer.fail(unavailable("draining", "The server is shutting down"))
