"""The engine that all sessions ask: started when it is first needed, and changed to another model.

A start that failed is an error of the request that waited for it; the next request tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from termgen.client import EngineClient
from termgen.errors import EngineError, TermgenError
from termgen.vocabulary.model_shelf import ModelChoice, ModelShelf, Report

STOP_S = 5.0
"""Longest wait for the engine's end."""

Start = Callable[[Report], Awaitable[EngineClient]]
Stop = Callable[[], Coroutine[Any, Any, None]]


class EngineSource:
    def __init__(self, start: Start, stop: Stop, shelf: ModelShelf) -> None:
        self._start = start
        self._stop = stop
        self._shelf = shelf
        self._getting: asyncio.Task[EngineClient] | None = None
        """The start, or the change of models, that came last."""
        self.phase = "starting"
        """What it does before it is ready."""

    @property
    def ready(self) -> EngineClient | None:
        """The engine; None before it has started."""
        task = self._getting
        is_there = task is not None and task.done() and not task.cancelled()
        return task.result() if task is not None and is_there and not task.exception() else None

    @property
    def is_starting(self) -> bool:
        return self._getting is not None and not self._getting.done()

    async def client(self) -> EngineClient:
        """The engine, as soon as it has started. Raises `TermgenError`. Cancelling the caller does
        not end the start."""
        task = self._getting
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._begin(self._start(self._report))
        return await asyncio.shield(task)

    def _begin(self, work: Awaitable[EngineClient]) -> asyncio.Task[EngineClient]:
        self._getting = task = asyncio.create_task(_with_clear_error(work))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is read
        return task

    def _report(self, phase: str, progress: float) -> None:
        self.phase = phase

    async def models(self) -> list[ModelChoice]:
        """The models that need not be fetched. Raises `TermgenError`."""
        choices = await self._shelf.choices()
        return [choice for choice in choices if choice.is_here and not choice.problem]

    async def switch(self, name: str) -> EngineClient:
        """Change to another model. Raises `TermgenError`; the former one then answers again, if it
        can be started."""
        failures: list[str] = []

        async def change() -> EngineClient:
            changed = await self._shelf.switch(name, self._report)
            if changed.failure is not None:
                failures.append(changed.failure)
            return changed.client

        client = await asyncio.shield(self._begin(change()))
        if failures:
            raise EngineError(f"{name} did not start: {failures[0]}; the former model is back")
        return client

    async def stop(self) -> None:
        """End the engine. Returns within `STOP_S`, ended or not."""
        task, self._getting = self._getting, None
        if task is not None and not task.done():
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._stop()


async def _with_clear_error(work: Awaitable[EngineClient]) -> EngineClient:
    try:
        return await work
    except TermgenError:
        raise
    except Exception as error:  # top of a start: any failure is an answer to who waits
        raise EngineError(f"the engine did not start: {type(error).__name__}: {error}") from error
