"""`termgen chat --web` in a real browser: type, watch the answer come, stop it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from fake_engine import FakeEngine, Script
from web_harness import ESCAPES, chat_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, or CHROMIUM=path")
ENTER, ESCAPE = 13, 27


async def test_a_chat(tmp_path: Path) -> None:
    endless = Script(pieces=tuple(f"word{i} " for i in range(100_000)), delay_s=0.01)
    engine = FakeEngine(script=endless)
    async with chat_page(tmp_path, engine) as server, browser(tmp_path / "profile") as open_page:
        page = await open_page(server.access.url)

        async def shown(condition: Callable[[str], bool]) -> None:
            async with asyncio.timeout(60):
                while not condition(ESCAPES.sub("", page.received.decode(errors="replace"))):
                    await asyncio.sleep(0.02)

        await shown(lambda text: "Ask anything" in text)
        await page.type("who is there?")
        await page.press("Enter", ENTER, "\r")
        await shown(lambda text: "word20" in text)
        await page.press("Escape", ESCAPE)
        await shown(lambda text: "stopped" in text)
        await page.picture(tmp_path / "page.png")
        print(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000, "a black page is smaller"
        own = (f"http://127.0.0.1:{server.port}/", "about:", "data:")
        assert all(url.startswith(own) for url in page.requested), page.requested
        assert engine.calls[0].prompt.messages[-1]["content"] == "who is there?"
