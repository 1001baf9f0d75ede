"""Who may use the page of `termgen chat --web`, and what it may load."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp
import pytest
from web_harness import chat_page, visitor

from termgen.errors import ConfigError
from termgen.web.web_server import WebServer

PAGE = Path(__file__).parents[2] / "termgen" / "web" / "page"


async def status(session: aiohttp.ClientSession, path: str, **options: object) -> int:
    async with session.get(path, allow_redirects=False, **options) as answer:  # type: ignore[arg-type]
        body = await answer.read()
        assert answer.status != 403 or body.startswith(b"refused: "), body
        return answer.status


async def test_nothing_is_given_without_the_token(tmp_path: Path) -> None:
    async with chat_page(tmp_path) as page, aiohttp.ClientSession(page.public_url) as session:
        for path in ("/", "/?token=", "/?token=guess", "/static/js/textual.js", "/page/page.js"):
            assert await status(session, path) == 403, path
        for path in ("/ws", "/download/x", "/nowhere", "/static/../web_server.py"):
            assert await status(session, path) == 403, path
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await session.ws_connect("/ws", headers={"Origin": page.public_url})
        assert page.num_visits == 0


async def test_the_token_leaves_the_address_and_a_cookie_stays(tmp_path: Path) -> None:
    async with chat_page(tmp_path) as page, aiohttp.ClientSession() as session:
        async with session.get(page.access.url, allow_redirects=False) as answer:
            assert answer.status == 303 and answer.headers["Location"] == "/"
            cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        token = page.access.url.partition("token=")[2]
        assert len(token) > 30 and token not in cookie
    async with chat_page(tmp_path) as page, visitor(page) as session:
        assert await status(session, "/") == 200
        assert await status(session, "/nowhere") == 404
        async with session.post("/") as answer:
            assert answer.status == 405


@pytest.mark.parametrize("path", ["/", "/ws", "/page/page.js"])
async def test_other_names_and_origins_are_refused(tmp_path: Path, path: str) -> None:
    """A page elsewhere would send them with the cookie of the visitor's browser."""
    async with chat_page(tmp_path) as page, visitor(page) as session:
        port = page.port
        own = f"http://127.0.0.1:{port}"
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
            assert await status(session, path, headers={"Host": host}) == 403, host
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", ""):
            assert await status(session, path, headers={"Origin": origin}) == 403, origin
        local = {"Host": f"localhost:{port}", "Origin": own}
        assert await status(session, path, headers=local) == 403, "two names of one machine"
        if path != "/ws":
            assert await status(session, path, headers={"Origin": own}) == 200
    async with chat_page(tmp_path) as page, visitor(page) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await session.ws_connect("/ws")  # without an origin: no browser


async def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for file in PAGE.iterdir():
        assert not re.search(r"https?:|//\w+\.", file.read_text().replace("// ", "")), file
    async with chat_page(tmp_path) as page, visitor(page) as session:
        async with session.get("/?fontsize=20") as answer:
            text = await answer.text()
            policy = answer.headers["Content-Security-Policy"]
            assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe-eval" not in policy and "script-src 'self';" in policy
        assert not re.search(r"<script>|onclick|onload", text, re.IGNORECASE)
        assert 'data-font-size="20"' in text and f"ws://127.0.0.1:{page.port}/ws" in text
        for path in re.findall(r'(?:src|href)="(/[^"]*)"', text):
            assert await status(session, path) == 200, path
        fonts = re.findall(r'url\("(/[^"]*)"\)', (PAGE / "page.css").read_text())
        assert len(fonts) == 2
        for path in fonts:
            assert await status(session, path) == 200, path


async def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    async with chat_page(tmp_path) as page:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{page.port}"):
            WebServer(("true",), {}, port=page.port, title="")
