"""The web server of a page with a terminal in it. On loopback only."""

from __future__ import annotations

import asyncio
import html
import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from aiohttp import WSMsgType, web
from textual_serve.server import Server

from termgen.errors import ConfigError
from termgen.system.sure_ends import to_its_end
from termgen.web.access import Access
from termgen.web.visit import Visit

logger = logging.getLogger("termgen.web")

HOST = "127.0.0.1"
MAX_VISITS = 8
"""Tabs at a time; each is a process."""
MAX_MESSAGE_BYTES = 4 << 20
"""A paste, at most."""
SIZES = {"width": (20, 500), "height": (5, 300)}
"""Least and most columns and rows of a terminal; others are cut to that."""
FONT_SIZES = (8, 40)
HEARTBEAT_S = 15.0
CLOSE_S = 2.0
PAGE = Path(__file__).parent / "page"


class WebServer(Server):
    """A program of textual for each tab that is opened."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], *, port: int, title: str
    ) -> None:
        """argv, environ: the program's command, and variables beside those of this process. Takes
        the port. Raises ConfigError if that is not possible."""
        self._socket = _bind(port)
        port = self._socket.getsockname()[1]
        super().__init__(argv[0], host=HOST, port=port, title=title)
        self._argv = tuple(argv)
        self._environ = dict(environ)
        self.access = Access(port)
        self._visits: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    @property
    def num_visits(self) -> int:
        return len(self._visits)

    async def start(self) -> None:
        """Accept connections, on the running event loop."""
        self._runner = web.AppRunner(
            await self._make_app(), access_log=None, shutdown_timeout=CLOSE_S
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def aclose(self) -> None:
        """End the programs of all tabs, and close. Idempotent."""
        for visit in self._visits:
            visit.cancel()
        await asyncio.gather(*self._visits, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket.close()

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self.access.middleware)
        app.router.add_static("/page", PAGE, name="page")
        return app

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing, which the base does."""

    async def handle_index(self, request: web.Request) -> web.StreamResponse:
        entering = self.access.enter(request)
        if entering is not None:
            return entering
        size = _within(request.query.get("fontsize"), FONT_SIZES, 16)
        text = Template((PAGE / "index.html").read_text(encoding="utf-8")).substitute(
            title=html.escape(self.title), font_size=size, socket=f"ws://{request.host}/ws"
        )
        return web.Response(text=text, content_type="text/html")

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        if len(self._visits) >= MAX_VISITS:
            raise web.HTTPServiceUnavailable(reason=f"{MAX_VISITS} tabs are open: close one")
        task = asyncio.current_task()
        assert task is not None
        self._visits.add(task)
        try:
            return await self._visit(request)
        finally:
            self._visits.discard(task)

    async def _visit(self, request: web.Request) -> web.WebSocketResponse:
        width = _within(request.query.get("width"), SIZES["width"], 80)
        height = _within(request.query.get("height"), SIZES["height"], 24)
        page = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=MAX_MESSAGE_BYTES)
        await page.prepare(request)

        async def write_bytes(data: bytes) -> None:
            with suppress(ConnectionError):  # the tab is closed
                await page.send_bytes(data)

        async def write_str(data: str) -> None:
            with suppress(ConnectionError):
                await page.send_str(data)

        async def close() -> None:
            await page.close()

        visit = Visit(
            self._argv,
            self._environ,
            write_bytes=write_bytes,
            write_str=write_str,
            close=close,
            download_manager=self.download_manager,
        )
        await visit.start(width, height)
        try:
            await self._read(page, visit)
        finally:
            await to_its_end(visit.stop())
        return page

    async def _read(self, websocket: web.WebSocketResponse, visit: Visit) -> None:
        async for message in websocket:
            if message.type is not WSMsgType.TEXT:
                continue
            try:
                kind, *rest = message.json()
                await self._handle(kind, rest, websocket, visit)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                logger.warning("a message of the page that says nothing: it is closed")
                await websocket.close(code=1003)

    async def _handle(
        self, kind: str, rest: list[Any], websocket: web.WebSocketResponse, visit: Visit
    ) -> None:
        """One message of the page. Raises what wrong values raise."""
        if kind == "stdin":
            await visit.send_bytes(rest[0].encode("utf-8", "replace"))
        elif kind == "resize":
            width = _within(rest[0]["width"], SIZES["width"], 80)
            await visit.set_terminal_size(width, _within(rest[0]["height"], SIZES["height"], 24))
        elif kind == "ping":
            await websocket.send_json(["pong", str(rest[0])])
        elif kind == "blur":
            await visit.blur()
        elif kind == "focus":
            await visit.focus()
        else:
            raise ValueError(kind)


def _within(value: object, limits: tuple[int, int], default: int) -> int:
    """A number from the page, within these limits; the default if it is none."""
    least, most = limits
    try:
        return min(most, max(least, int(value)))  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        return default


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {HOST}:{port}: {reason}", param="web_port") from None
    return listener
