"""Servers with a model: in the test's event loop, or in a thread of their own for clients that
block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from server_harness import serving

from termgen.config import EngineConfig, ServerConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.server import Server


@asynccontextmanager
async def serving_tiny(
    folder: Path, **config: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, AsyncEngine], None]:
    settings = {"model": str(folder), "device": "cpu", "max_model_len": 256, "kv_cache_gib": 0.01}
    settings |= config
    engine = await AsyncEngine.start(EngineConfig(**settings))
    try:
        async with serving(engine, served_model_name=("tiny",)) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                yield client, engine
    finally:
        await engine.shutdown()


class RealServer:
    """Serves from its construction until `close`."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._ready: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="real-server")
        self._thread.start()
        self.url = self._ready.result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        config = EngineConfig(
            model=str(self._model), device="cpu", max_model_len=1024, kv_cache_gib=0.2
        )
        engine = await AsyncEngine.start(config)
        server = Server(engine, ServerConfig(port=0, served_model_name=("smollm2",)))
        task = asyncio.create_task(server.serve())
        await server.started()
        self._ready.set_result(server.url)
        await self._stop.wait()
        await server.stop(drain_timeout=0)
        await task
        await engine.shutdown()
