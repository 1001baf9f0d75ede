"""`SyncEngine`: an engine that runs in its caller's thread, for offline use and tests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from termgen.client import ModelInfo, PauseMode, SleepLevel, TokenDelta
from termgen.config import EngineConfig
from termgen.engine.loop.control import EngineControl, check_level
from termgen.engine.loop.sleep import fall_asleep, wake_up
from termgen.engine.loop.startup import Progress, build_engine
from termgen.engine.text.input_processor import InputProcessor
from termgen.engine.text.tokenizer import Tokenizer
from termgen.vocabulary.events import EngineSnapshot
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.step import StepDelivery

Settled = TypeVar("Settled", bool, None)
"""Result type of a command that has taken effect."""


class SyncEngine:
    """An engine that runs when `step` is called, on one thread only."""

    def __init__(self, config: EngineConfig, on_progress: Progress | None = None) -> None:
        self._deliveries: deque[StepDelivery] = deque()
        self._parts = build_engine(
            config, on_delivery=self._deliveries.append, on_progress=on_progress
        )
        self.core = self._parts.core
        self._news: list[TokenDelta] = []

    @property
    def model(self) -> ModelInfo:
        return self._parts.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._parts.tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        return self._parts.input_processor

    @property
    def has_unfinished(self) -> bool:
        """True if `step` has work or results. Paused requests do not count."""
        return bool(self.core.has_work or self._news)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request."""
        arrival_ns = time.perf_counter_ns()
        for completion in self._parts.output_processor.expect(request, arrival_ns):
            self.core.submit(completion, arrival_ns)

    def abort(self, request_id: str) -> None:
        """Stop a request; its last deltas have finish_reason ABORT."""
        for engine_id in self._parts.output_processor.engine_ids(request_id):
            self.core.abort(engine_id)

    def step(self) -> list[TokenDelta]:
        """Run one engine step and return its deltas; when idle, do deferred work and return []."""
        if not self._turn():
            self.core.use_idle_time()
        news, self._news = self._news, []
        return news

    def _turn(self) -> bool:
        was_busy = self.core.step()
        while self._deliveries:
            self._news += self._parts.output_processor.process(self._deliveries.popleft())
        for request_id in self._parts.output_processor.take_aborts():
            self.core.abort(request_id)
        return was_busy

    def _settled(self, command: Callable[[EngineControl], Future[Settled]]) -> Settled:
        """Step until a command has taken effect; the next `step` returns the deltas of these."""
        asked = self.core.call(lambda: command(self.core.control))
        while not (asked.done() and (asked.exception() or asked.result().done())):
            self._turn()
        settled: Future[Settled] = asked.result()
        return settled.result()

    def snapshot(self) -> EngineSnapshot:
        return self.core.copy_state().snapshot()

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `EngineClient.pause`."""
        self._settled(lambda control: control.pause(mode))

    def resume(self) -> None:
        """See `EngineClient.resume`."""
        self.core.control.resume()

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """See `EngineClient.reset_prefix_cache`."""
        return self._settled(lambda control: control.reset_prefix_cache(force))

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        """See `EngineClient.sleep`."""
        check_level(level)
        self.pause(mode)
        fall_asleep(self.core, level)

    def wake_up(self) -> None:
        """See `EngineClient.wake_up`."""
        wake_up(self.core)

    @property
    def sleep_level(self) -> int:
        """See `EngineClient.sleep_level`."""
        return self.core.control.sleep_level

    def shutdown(self) -> None:
        """Free the model and drop all requests. Idempotent."""
        self.core.drain()
        self.input_processor.close()
        self.core.executor.shutdown()
