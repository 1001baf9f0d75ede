"""A page with a terminal, over a scripted server."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from fake_engine import FakeEngine
from server_harness import serving

from termgen.web.web_server import WebServer

ESCAPES = re.compile(r"\x1b\[[\d;?<=>]*[A-Za-z]|\x1b[P\]_][^\x1b\x07]*(?:\x07|\x1b\\)|\x1b.")
START_S = 60.0


@asynccontextmanager
async def chat_page(
    folder: Path, engine: FakeEngine | None = None, **variables: str
) -> AsyncGenerator[WebServer, None]:
    """Its tabs keep their chats in `folder`."""
    key = {"OPENAI_API_KEY": "secret", "TERMGEN_CHAT_DB": str(folder / "chats.sqlite3")}
    async with serving(engine or FakeEngine(), api_key=("secret",)) as server:
        argv = (sys.executable, "-m", "termgen", "chat", "--url", server.url)
        page = WebServer(argv, {**key, **variables}, port=0, title="termgen chat")
        await page.start()
        try:
            yield page
        finally:
            await page.aclose()


@asynccontextmanager
async def visitor(page: WebServer) -> AsyncGenerator[aiohttp.ClientSession, None]:
    """A client that has opened the address with the token."""
    jar = aiohttp.CookieJar(unsafe=True)  # keeps cookies of an IP address
    async with aiohttp.ClientSession(page.public_url, cookie_jar=jar) as session:
        async with session.get(page.access.url) as answer:
            assert answer.status == 200, await answer.text()
        yield session


class Tab:
    """The page's socket, as its script uses it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.received = b""

    @property
    def plain(self) -> str:
        return ESCAPES.sub("", self.received.decode(errors="replace"))

    async def type(self, text: str) -> None:
        await self.socket.send_json(["stdin", text])

    async def read_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(START_S):
            while not condition():
                message = await self.socket.receive()
                assert message.type is aiohttp.WSMsgType.BINARY, (message, self.plain[-500:])
                self.received += message.data


@asynccontextmanager
async def tab(
    session: aiohttp.ClientSession, page: WebServer, **query: Any
) -> AsyncGenerator[Tab, None]:
    origin = page.public_url
    async with session.ws_connect("/ws", params=query, headers={"Origin": origin}) as socket:
        yield Tab(socket)
