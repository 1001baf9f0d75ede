"""Start an engine with a front end. Called by `cli`; imports happen where they are used.

The model is found, and the default model fetched, before a screen opens, so that errors are one
line on the plain terminal. Loading happens behind the front end's own loading screen.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Literal

from termgen.commands.exit_codes import OK
from termgen.config import EngineConfig, ServerConfig, UIConfig
from termgen.system.remembered import Remembered

if TYPE_CHECKING:
    from termgen.client import EngineClient
    from termgen.library.progress import TerminalProgress
    from termgen.server import Server
    from termgen.tools.toolbox import Toolbox
    from termgen.tui.app import TermgenApp
    from termgen.tui.chat.saved.chat_store import ChatStore, Resume
    from termgen.vocabulary.model_shelf import ModelShelf, OtherModels

Progress = Callable[[str, float], None]
StartEngine = Callable[[Progress], Awaitable["EngineClient"]]
StopEngine = Callable[[], Coroutine[Any, Any, None]]

QUIT_DRAIN_S = 3.0
"""Drain timeout when the dashboard is quit: its screen is frozen meanwhile."""


class EngineHolder:
    """The engine of this process, with the start and stop functions that front ends take."""

    def __init__(self, config: EngineConfig, *, prewarm: bool = False) -> None:
        """prewarm: build lazily created tables at start-up, so that no first request of a kind
        delays others."""
        self.config = config
        self._prewarm = prewarm
        self._engine: Any = None

    @property
    def client(self) -> EngineClient | None:
        """The running engine, or None."""
        client: EngineClient | None = self._engine
        return client

    async def start(self, on_progress: Progress) -> EngineClient:
        """Load the model."""
        assert self._engine is None, "the engine runs already"
        # importing torch takes over a second; the loading screen must draw meanwhile
        module = await asyncio.to_thread(importlib.import_module, "termgen.engine.loop.engine")
        self._engine = await module.AsyncEngine.start(
            self.config, on_progress=on_progress, prewarm=self._prewarm
        )
        client: EngineClient = self._engine
        return client

    async def restart(self, config: EngineConfig, on_progress: Progress) -> EngineClient:
        """End the engine, then start another one: memory may suffice for one only."""
        await self.stop()
        gc.unfreeze()  # objects of the former engine are garbage now, some of them in cycles
        gc.collect()
        self.config = config
        return await self.start(on_progress)

    async def stop(self) -> None:
        """End the engine if it was started. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()


class CatalogFetcher:
    """Fetches models for administrators of a server."""

    def num_bytes(self, name: str) -> int | None:
        """About how much is fetched; None for a model that the catalog does not know."""
        from termgen.library.catalog import CATALOG

        known = CATALOG.get(name.lower())
        return None if known is None else known.download_bytes

    def fetch(self, name: str, report: Progress) -> None:
        """Fetch a model of the catalog or the hub. Raises ModelError."""
        from termgen.library.catalog import pull

        pull(name, report)


def run_serve(config: EngineConfig, server_config: ServerConfig, ui: UIConfig) -> int:
    if server_config.dashboard:
        from termgen.tui.app import TermgenApp

        TermgenApp.check_settings(ui)
    from termgen.library.catalog import ensure_model

    with _progress() as progress:
        ensure_model(config.model, progress)
    holder = EngineHolder(config, prewarm=True)
    from termgen.server import Server, run_server

    if not server_config.dashboard:
        return run_server(holder.start, holder.stop, server_config, fetcher=CatalogFetcher())
    server = Server(None, server_config, fetcher=CatalogFetcher())
    server.bind()  # report a port in use on the plain terminal, before any screen
    served = ServedEngine(holder, server, drain_s=server_config.drain_timeout)
    return run_app(
        served.start,
        served.stop,
        ui,
        start_screen="dashboard",
        found_by=lambda: model_argument(holder.config),
        remembered=Remembered.of_user(),
    )


def model_argument(config: EngineConfig) -> tuple[str, ...]:
    """The command line's words for the model; none for the default one."""
    return () if config.model is None else ("--model", config.model)


class ServedEngine:
    """The engine with its server, both on the event loop of the dashboard."""

    def __init__(self, holder: EngineHolder, server: Server, *, drain_s: float) -> None:
        self._holder = holder
        self._server = server
        self._drain_s = drain_s
        self._serving: asyncio.Task[None] | None = None

    async def start(self, on_progress: Progress) -> EngineClient:
        """Accept connections at once (answered 503 while loading), then load."""
        self._serving = serving = asyncio.create_task(self._server.serve())
        started = asyncio.create_task(self._server.started())
        await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            started.cancel()
            serving.result()  # raises what went wrong

        def report(phase: str, fraction: float) -> None:
            self._server.on_loading(phase, fraction)
            on_progress(phase, fraction)

        engine = await self._holder.start(report)
        self._server.attach(engine)
        return engine

    async def stop(self) -> None:
        """Close the server and end the engine. Idempotent."""
        serving, self._serving = self._serving, None
        try:
            if serving is not None:
                await self._server.stop(drain_timeout=min(self._drain_s, QUIT_DRAIN_S))
                await serving
        finally:
            await self._holder.stop()


def run_app(
    start: StartEngine,
    stop: StopEngine,
    ui: UIConfig,
    *,
    start_screen: Literal["chat", "dashboard"],
    models: ModelShelf | None = None,
    chats: ChatStore | None = None,
    resume: Resume | None = None,
    toolbox: Toolbox | None = None,
    found_by: Callable[[], Sequence[str]] = tuple,
    others: OtherModels | None = None,
    remembered: Remembered,
    notices: Sequence[str] = (),
) -> int:
    """Run the terminal app until the user quits. It starts and stops the engine. found_by and
    notices: see `TermgenApp`."""
    from termgen.tui.app import TermgenApp
    from termgen.tui.chat.saved.chat_store import ChatStore, store_path

    for name in ("termgen", "uvicorn"):  # log lines would garble the app's screen
        logging.getLogger(name).addHandler(logging.NullHandler())

    chats = chats or ChatStore(store_path(ui.chat_db))
    app = TermgenApp(
        start,
        stop_engine=stop,
        ui=ui,
        start_screen=start_screen,
        models=models,
        chats=chats,
        resume=resume,
        toolbox=toolbox,
        found_by=found_by,
        others=others,
        remembered=remembered,
        notices=notices,
    )
    try:
        app.run()
    finally:
        asyncio.run(stop())  # a no-op unless the app ended before stopping the engine
    return end_app(app)


def end_app(app: TermgenApp) -> int:
    """Say below the screen what became of the chat; returns the exit code."""
    if app.chats.trouble:
        print(f"termgen: error: {app.chats.trouble}", file=sys.stderr)
    elif app.resume_command:  # in one line, however long: it is there to be copied
        print(f"resume: {app.resume_command}", file=sys.stderr)
    return app.return_code or OK


def _progress() -> TerminalProgress:
    from termgen.library.progress import TerminalProgress

    return TerminalProgress()


def run_bench(name: str, options: Any, config: EngineConfig) -> int:
    from termgen.bench import report

    report.check_writable(options.output_json)
    return asyncio.run(_bench(name, options, config))


async def _bench(name: str, options: Any, config: EngineConfig) -> int:
    from termgen.bench import report
    from termgen.bench.offline import run_latency, run_throughput
    from termgen.library.catalog import ensure_model
    from termgen.vocabulary.startup_phases import describe_startup

    holder = EngineHolder(config)
    try:
        with _progress() as progress:
            ensure_model(config.model, progress)
            client = await holder.start(progress)
        if client.model.memory is not None:
            print(f"termgen: {client.model.memory}", file=sys.stderr)
        print(f"termgen: {describe_startup(client.model.startup)}", file=sys.stderr)
        run: Any = run_latency if name == "latency" else run_throughput
        result = await run(client, options, seed=config.seed)
    finally:
        await holder.stop()
    print(report.summary(name, client.model, result))
    if options.output_json is not None:
        content = report.document(name, client.model, result, config=config, options=options)
        report.write(options.output_json, content)
    return OK
