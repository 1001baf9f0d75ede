"""Who may use the page: holders of a token, from this machine, by this page.

Any web page that the user visits can send requests to this machine. So each must name this server
as its host, which no page of another name can have rebound to this address, must not come from a
page of another origin, and must bring a cookie that only an address with the token gives.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

TOKEN_BYTES = 24
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self';"
        " img-src 'self' data:; connect-src 'self' {sockets}; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""xterm.js sets styles of elements; nothing comes from elsewhere."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access:
    """The token of one server, and the check of its requests."""

    def __init__(self, port: int) -> None:
        self._token = secrets.token_urlsafe(TOKEN_BYTES)
        self._session = secrets.token_urlsafe(TOKEN_BYTES)
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self._cookie = f"termgen-{port}"  # cookies do not tell ports apart
        self.url = f"http://127.0.0.1:{port}/?token={self._token}"
        """The page with the token, to be opened once in a browser."""

    def refusal(self, request: web.Request) -> str:
        """Why a request is refused; empty if it is not."""
        if request.headers.getall("Host", []) != [request.host] or request.host not in self._hosts:
            return "open it as 127.0.0.1 or localhost, at its own port"
        origins = request.headers.getall("Origin", [])
        is_socket = "Upgrade" in request.headers
        if (origins or is_socket) and origins != [f"http://{request.host}"]:
            return "it came from a page of another origin"
        if request.path == "/" and self._same(request.query.get("token"), self._token):
            return ""
        if not self._same(request.cookies.get(self._cookie), self._session):
            return "open the address that termgen has printed: it has the token"
        return ""

    @staticmethod
    def _same(given: str | None, wanted: str) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), wanted.encode())

    def enter(self, request: web.Request) -> web.Response | None:
        """The answer to a request with the token, which gives the cookie and has the token leave
        the address; None for another request."""
        if "token" not in request.query:
            return None
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(self._cookie, self._session, path="/", httponly=True, samesite="Strict")
        return answer

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what may not come in; give every answer the headers of a closed page."""
        if request.method not in ("GET", "HEAD"):
            answer: web.StreamResponse = web.Response(status=405, text="only GET\n")
        elif why := self.refusal(request):
            answer = web.Response(status=403, text=f"refused: {why}\n")
        else:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = web.Response(status=error.status, text=f"{error.reason}\n")
        if not answer.prepared:
            sockets = f"ws://{request.host}"
            for name, value in HEADERS.items():
                answer.headers[name] = value.format(sockets=sockets)
        return answer
