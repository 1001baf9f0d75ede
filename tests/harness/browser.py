"""Chromium without a window, driven by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
"""None where there is no such browser."""
START_S = 30.0


class Page:
    """One tab. Its socket's frames are kept as they come."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.received = b""
        """What the page's own socket has brought."""
        self.requested: list[str] = []
        """Addresses that the page has asked for."""
        self.errors: list[str] = []
        """What its program threw, and wrote into the console as an error."""

    async def _read(self) -> None:
        async for message in self._socket:
            body = message.json()
            if "id" in body:
                self._answers.pop(body["id"]).set_result(body)
            elif body["method"] == "Network.webSocketFrameReceived":
                frame = body["params"]["response"]
                if frame["opcode"] == 2:
                    self.received += base64.b64decode(frame["payloadData"])
            elif body["method"] == "Network.requestWillBeSent":
                self.requested.append(body["params"]["request"]["url"])
            elif body["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(body["params"]["exceptionDetails"]))
            elif body["method"] == "Runtime.consoleAPICalled":
                if body["params"]["type"] in ("error", "assert"):
                    self.errors.append(str(body["params"]["args"]))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        body = await asyncio.wait_for(answer, START_S)
        assert "error" not in body, body
        result: dict[str, Any] = body["result"]
        return result

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def picture(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def aclose(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()


@asynccontextmanager
async def browser(folder: Path) -> AsyncGenerator[Callable[[str], Awaitable[Page]], None]:
    """A browser with a new profile in `folder`; yields a function that opens a page."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--remote-debugging-port=0", "--window-size=1000,700", f"--user-data-dir={folder}"),
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    pages: list[Page] = []
    async with aiohttp.ClientSession() as session:
        base = f"http://127.0.0.1:{await _port(folder)}"

        async def open_page(url: str) -> Page:
            async with session.put(f"{base}/json/new?about:blank") as answer:
                target = await answer.json()
            page = Page(
                await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 << 20)
            )
            pages.append(page)
            for domain in ("Network", "Page", "Runtime"):
                await page.send(f"{domain}.enable")
            await page.send("Page.navigate", url=url)
            return page

        try:
            yield open_page
        finally:
            for page in pages:
                await page.aclose()
            process.kill()
            await process.wait()


async def _port(folder: Path) -> int:
    """The port of the protocol, which the browser writes into its profile."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                return int((folder / "DevToolsActivePort").read_text().split()[0])
            except (FileNotFoundError, IndexError):
                await asyncio.sleep(0.05)
