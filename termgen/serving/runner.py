"""Sockets, signals and shutdown: `Server` for embedding, `run_server` for plain `termgen serve`.

Stopping drains: new requests get 503 while running ones finish, up to the drain timeout; the rest
ends with an error frame. The port is taken before the model is loaded, so that a port in use is
reported at once, and `/health` says `loading` meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

import uvicorn

from termgen import __version__
from termgen.api.ollama.pull import Fetcher
from termgen.client import EngineClient
from termgen.config import ServerConfig, is_loopback
from termgen.errors import ConfigError
from termgen.serving.app import build_app
from termgen.serving.connection import Connection
from termgen.serving.state import ServerState
from termgen.vocabulary.startup_phases import READY

logger = logging.getLogger("termgen.server")

KEEP_ALIVE_S = 75
"""Timeout of idle connections; a shorter one would race with clients that pool them."""
CLOSE_GRACE_S = 3
"""Time for connections to flush once every answer has ended."""
ABORT_GRACE_S = 2.0
"""Time for aborted answers to write their error frame."""

Progress = Callable[[str, float], None]
StartEngine = Callable[[Progress], Awaitable[EngineClient]]
StopEngine = Callable[[], Awaitable[None]]


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with an event for the moment it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


class Server:
    """One HTTP server on the running event loop. Installs no signal handlers.

    server = Server(engine, config)
    task = asyncio.create_task(server.serve())
    ...
    await server.stop()     # drains; `serve` has returned afterwards
    """

    def __init__(
        self,
        engine: EngineClient | None,
        config: ServerConfig,
        *,
        fetcher: Fetcher | None = None,
    ) -> None:
        """Without an engine, requests are answered 503 `loading` until `attach`. fetcher: fetches
        models for administrators."""
        self._config = config
        self._state = ServerState(config)
        self._state.fetcher = fetcher
        if engine is not None:
            self._state.attach(engine)
        self._sockets: list[socket.socket] = []
        self._url: str | None = None
        self.ollama_url: str | None = None
        """The address of the second port, if there is one, once it is taken."""
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                build_app(self._state),
                http=Connection,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="on",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_GRACE_S,
            )
        )
        self._ended = asyncio.Event()
        self._is_serving = False

    def attach(self, engine: EngineClient) -> None:
        """Begin to serve this engine."""
        self._state.attach(engine)

    def on_loading(self, phase: str, fraction: float) -> None:
        """Note the progress of the engine's start, for /health and the answers 503 `loading`."""
        self._state.on_loading(phase, fraction)

    def bind(self) -> None:
        """Take the ports, as `serve` does too. Raises `ConfigError` when that is not possible."""
        if self._sockets:
            return
        self._check_access()
        config = self._config
        main = _bind(config.host, config.port, "port")
        self._sockets.append(main)
        self._url = _url_of(main)
        if config.ollama_port is not None:
            try:
                second = _bind(config.host, config.ollama_port, "ollama_port")
            except ConfigError:
                self._close_sockets()
                raise
            self._sockets.append(second)
            self.ollama_url = _url_of(second)

    def _close_sockets(self) -> None:
        for listener in self._sockets:
            listener.close()

    def _check_access(self) -> None:
        config = self._config
        if self._state.keys.has_client_keys or is_loopback(config.host):
            return
        if not config.insecure_no_auth:
            raise ConfigError(
                f"anyone who reaches {config.host} could use this server: set --api-key or "
                "--api-key-file, or allow it with --insecure-no-auth",
                param="host",
            )
        logger.warning("anyone who reaches %s can use this server: no key is set", config.host)

    @property
    def url(self) -> str:
        """The address for clients; known once the port is taken."""
        assert self._url is not None, "bind first"
        return self._url

    @property
    def num_answers(self) -> int:
        """Answers under way."""
        return self._state.num_answers

    async def started(self) -> None:
        """Returns when connections are accepted."""
        await self._uvicorn.listens.wait()

    async def serve(self) -> None:
        """Accept connections until `stop`. Cancelling it ends what is under way, then closes."""
        self.bind()
        if self._uvicorn.should_exit:  # stopped before it began
            return
        self._is_serving = True
        # a task of its own: cancelled in the middle, uvicorn would leave connections behind
        running = asyncio.ensure_future(self._uvicorn.serve(sockets=self._sockets))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop_now()
            await running
            raise
        finally:
            self._close_sockets()
            self._state.detach()
            self._ended.set()

    async def stop(self, *, drain_timeout: float | None = None) -> None:
        """Refuse new requests, let the ones under way finish, then close."""
        timeout_s = self._config.drain_timeout if drain_timeout is None else drain_timeout
        self._state.is_draining = True
        if not await self._state.wait_idle(timeout_s):
            self._state.fail_all()
            await self._state.wait_idle(ABORT_GRACE_S)
        self._state.end_what_waits()
        self._uvicorn.should_exit = True
        if self._is_serving:
            await self._ended.wait()
        else:
            self._close_sockets()

    def stop_now(self) -> None:
        """End running answers instead of waiting for them, on a second signal."""
        self._state.is_draining = True
        self._state.fail_all()
        self._state.end_what_waits()
        self._uvicorn.should_exit = True


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(host: str, port: int, param: str) -> socket.socket:
    """param: the setting that has the port."""
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error}", param="host") from None
    # prefer the IPv4 address of a name: every client tries it
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param=param) from None
    return listener


def run_server(
    start_engine: StartEngine,
    stop_engine: StopEngine,
    config: ServerConfig,
    *,
    on_progress: Progress | None = None,
    on_ready: Callable[[str], None] | None = None,
    fetcher: Fetcher | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; a second one stops at once. Returns the exit code, 0.

    `on_progress` is called with the progress of loading, `on_ready` with the URL once the model
    answers; both default to log lines. Raises `ConfigError` (the port) and any error of
    `start_engine`.
    """
    handler = _log_to_stderr()
    server = partial(Server, None, config, fetcher=fetcher)  # made on its event loop
    try:
        asyncio.run(_run(start_engine, stop_engine, server, on_progress, on_ready))
    finally:
        for name in ("termgen", "uvicorn.error"):
            logging.getLogger(name).removeHandler(handler)
    return 0


def _log_to_stderr() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name, level in (("termgen", logging.INFO), ("uvicorn.error", logging.WARNING)):
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(level)
    return handler


async def _run(
    start_engine: StartEngine,
    stop_engine: StopEngine,
    new_server: Callable[[], Server],
    on_progress: Progress | None,
    on_ready: Callable[[str], None] | None,
) -> None:
    server = new_server()
    server.bind()
    signals = _Signals()
    serving = asyncio.create_task(server.serve())
    try:
        with signals.handled():
            if await _load(server, start_engine, on_progress or _PhaseLog(), signals, serving):
                (on_ready or _log_ready)(server.url)
                if server.ollama_url is not None:
                    logger.info("Ollama's clients find it at %s", server.ollama_url)
                await _first(signals.wait(1), serving)
            await _stop(server, signals)
        await serving
    finally:
        try:
            await server.stop(drain_timeout=0)
        finally:
            await stop_engine()


async def _load(
    server: Server,
    start_engine: StartEngine,
    on_progress: Progress,
    signals: _Signals,
    serving: asyncio.Task[None],
) -> bool:
    """Start the engine, unless a signal comes first."""

    def report(phase: str, fraction: float) -> None:
        server.on_loading(phase, fraction)
        on_progress(phase, fraction)

    loading = asyncio.ensure_future(start_engine(report))
    await _first(signals.wait(1), serving, loading)
    if loading.done():
        server.attach(loading.result())
        return True
    loading.cancel()
    await asyncio.wait((loading,))
    return False


async def _stop(server: Server, signals: _Signals) -> None:
    if server.num_answers:
        logger.info("answers to finish: %d; a second signal ends them now", server.num_answers)
    stopping = asyncio.create_task(server.stop())
    await _first(signals.wait(2), stopping)
    if not stopping.done():
        logger.info("stopping now")
        server.stop_now()
    await stopping


async def _first(*awaitables: Any) -> None:
    """Wait until one is done. Coroutines are cancelled then, tasks go on."""
    futures = [asyncio.ensure_future(a) for a in awaitables]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, given in zip(futures, awaitables, strict=True):
            if future is not given:
                future.cancel()


class _Signals:
    """Counts SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self._count = 0
        self._events = (asyncio.Event(), asyncio.Event())

    async def wait(self, count: int) -> None:
        """Until this many signals have come, 1 or 2."""
        await self._events[count - 1].wait()

    @contextlib.contextmanager
    def handled(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        # signal.signal and not add_signal_handler: Windows has only the former
        before = {
            number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._on_signal))
            for number in numbers
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self) -> None:
        self._count += 1
        for event in self._events[: self._count]:
            event.set()


class _PhaseLog:
    """One log line per phase of loading."""

    def __init__(self) -> None:
        self._phase: str | None = None

    def __call__(self, phase: str, fraction: float) -> None:
        if phase != self._phase and phase != READY:  # the line about the whole start says so
            self._phase = phase
            logger.info("%s", phase)


def _log_ready(url: str) -> None:
    logger.info("termgen %s serves at %s", __version__, url)
