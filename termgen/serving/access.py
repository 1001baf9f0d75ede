"""Access control: API keys, the admin key, and web pages of other sites. Pure ASGI middleware.

Default deny: with keys set, every path but the open ones of the table of endpoints needs one,
whether a route exists or not.
Actions for administrators are `AdminRoute`s: the route itself checks the caller, so that no
spelling of a path finds the route and avoids the check. Paths are read from the scope, never from a
URL that a client's Host header can change. Keys are compared by digest, all of them, and never
logged. The result is a `Caller` in the scope; its `salt` keeps the prefix caches of different keys
apart.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from termgen.api.errors import admin_only, invalid_api_key, origin_not_allowed, path_not_found
from termgen.config import ServerConfig, is_loopback
from termgen.errors import ConfigError

logger = logging.getLogger("termgen.server")

LOCAL_PAGES = "localhost"
"""Value of `--allowed-origin` for the pages of this machine."""
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
CALLER = "termgen.caller"
KEYS = "termgen.keys"
REQUEST_ID = "termgen.request_id"
"""Keys of the ASGI scope."""

MAX_KEY_FILE_BYTES = 2**20


class Role(enum.Enum):
    ANYONE = "anyone"
    """No key was needed."""
    CLIENT = "client"
    ADMIN = "admin"
    """Holds the admin key, or calls a loopback address of a server without keys, and so owns the
    machine."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    role: Role = Role.ANYONE
    salt_key: bytes | None = field(default=None, repr=False, compare=False)
    """Differs from key to key; None where all callers share one prefix cache. A caller may get one
    when keys are added."""
    key_digest: bytes = field(default=b"", repr=False)
    """Digest of the key; it identifies the caller."""

    def salt(self, cache_salt: str | None) -> str | None:
        """The cache salt for this caller's request, whose own field is `cache_salt`."""
        if self.salt_key is None:
            return cache_salt
        return hmac.new(self.salt_key, (cache_salt or "").encode(), hashlib.sha256).hexdigest()


def caller_of(scope: Scope) -> Caller:
    caller: Caller = scope[CALLER]
    return caller


def client_of(scope: Scope) -> str:
    """Name of the client for fair scheduling: the key, or the connection where there is none."""
    caller = caller_of(scope)
    if caller.key_digest:
        return caller.key_digest.hex()
    return repr(scope.get("client"))


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


class KeyRing:
    """The keys of one server, as digests."""

    def __init__(self, config: ServerConfig) -> None:
        """Reads the key file. Raises `ConfigError`."""
        self._config = config
        self._secret = secrets.token_bytes(32)
        self._seen: set[bytes] = set()
        """Digests of the keys there are and were."""
        self._has_admin_keys = bool(config.admin_key)
        self.has_client_keys = False
        self._callers: list[tuple[bytes, Caller]] = []
        self.use(read_key_file(config.api_key_file) if config.api_key_file is not None else [])
        owns_machine = not self._callers and is_loopback(config.host)
        self._nobody = Caller(Role.ADMIN if owns_machine else Role.ANYONE)

    def use(self, of_file: Sequence[str]) -> bool:
        """Accept these keys of the key file, and the configured ones, from now on; returns whether
        that is news. Raises `ConfigError`, and then changes nothing."""
        clients = [*self._config.api_key, *of_file]
        roles = [(key, Role.CLIENT) for key in clients]
        roles += [(key, Role.ADMIN) for key in self._config.admin_key]
        if set(clients) & set(self._config.admin_key):
            raise ConfigError("admin_key must differ from every api_key", param="admin_key")
        digests = [_digest(key.encode()) for key, _ in roles]
        # keys that are gone count: the next one must not find what they left in the cache
        self._seen.update(digests)
        is_shared = self._config.share_prefix_cache or len(self._seen) < 2
        before = {digest for digest, _ in self._callers}
        self._callers = [
            (digest, Caller(role, None if is_shared else _derive(self._secret, key), digest))
            for digest, (key, role) in zip(digests, roles, strict=True)
        ]
        self.has_client_keys = bool(clients)
        return before != set(digests)

    def find(self, key: bytes) -> Caller | None:
        """The caller with this key. Takes the same time for every key, known or not."""
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found

    def check(self, path: str, key: bytes | None, *, is_open: bool = False) -> Caller:
        """The caller, if it may use the server. is_open: this path needs no key. Raises
        `RequestError`."""
        if not path.isprintable():  # patterns of routes also match before a line break at the end
            raise path_not_found()
        caller = self.find(key) if key is not None else None
        if caller is None and self.has_client_keys and not is_open:
            raise invalid_api_key()
        return caller or self._nobody

    def require_admin(self, caller: Caller) -> None:
        """Raises `RequestError`: 401 or 403."""
        if caller.role is Role.ADMIN:
            return
        if caller.role is Role.ANYONE and self._has_admin_keys:
            raise invalid_api_key()
        raise admin_only(is_possible=self._has_admin_keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _derive(secret: bytes, key: str) -> bytes:
    return hmac.new(secret, key.encode(), hashlib.sha256).digest()


class KeyFileWatch:
    """Looks whether the key file has changed, and passes its keys on.

    A change is read once the file has stayed as it is from one look to the next: what is half
    written could end in the middle of a key. A file with a fault changes nothing.
    """

    def __init__(self, keys: KeyRing, name: str) -> None:
        self._keys = keys
        self._name = name
        self._last: tuple[int, ...] | None = None
        self._used: tuple[int, ...] | None = None

    def look(self) -> bool:
        """True if other keys hold now."""
        mark, last = self._mark(), self._last
        self._last = mark
        if mark is None or mark == self._used or mark != last:
            return False
        self._used = mark
        try:
            is_new = self._keys.use(read_key_file(self._name))
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
            return False
        if is_new:
            logger.info("the keys are now those that api_key_file %s holds", self._name)
        return is_new

    def _mark(self) -> tuple[int, ...] | None:
        """What changes with the file; None for a pipe, which can be read once."""
        try:
            found = os.stat(self._name)
        except OSError:
            return ()
        if not stat.S_ISREG(found.st_mode):
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def read_key_file(name: str) -> list[str]:
    """Keys of a file, one a line; empty lines and those that begin with # are skipped."""
    path = Path(name)
    try:
        if stat.S_ISREG(path.stat().st_mode) and path.stat().st_size > MAX_KEY_FILE_BYTES:
            raise ConfigError(f"api_key_file {name} is too large", param="api_key_file")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"api_key_file {name}: {reason}", param="api_key_file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file {name} is not text", param="api_key_file") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:  # an emptied file must not open the server
        raise ConfigError(f"api_key_file {name} holds no key", param="api_key_file")
    return keys


class ApiKeyCheck:
    """Rejects the callers that `KeyRing.check` rejects; leaves the `Caller` in the scope."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, open_paths: frozenset[str]) -> None:
        """open_paths: those that need no key."""
        self.app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            path = scope["path"]
            is_open = path in self._open_paths
            scope[CALLER] = self._keys.check(path, _key_of(scope), is_open=is_open)
            scope[KEYS] = self._keys
        await self.app(scope, receive, send)


def _key_of(scope: Scope) -> bytes | None:
    """`Authorization: Bearer KEY`, or `x-api-key` as Anthropic's clients send it."""
    authorization = header(scope, b"authorization")
    if authorization is None:
        key = header(scope, b"x-api-key")
        return None if key is None else key.strip().encode("latin-1")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer":
        return None
    return key.strip().encode("latin-1")


class AdminRoute(Route):
    """A route for administrators, whatever the method: it changes the engine for every client, or
    shows what other clients do."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys: KeyRing = scope[KEYS]
        keys.require_admin(caller_of(scope))
        await super().handle(scope, receive, send)


class OriginCheck:
    """Rejects requests from web pages of other sites, whether or not they could read the answer.

    Browsers send the page's origin; programs send none. Pages of the server itself are allowed, and
    those that the configuration allows.
    """

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        self.app = app
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            origin = header(scope, b"origin")
            if origin is not None and not self._is_allowed(origin.lower(), scope):
                raise origin_not_allowed(origin[:100])
        await self.app(scope, receive, send)

    def _is_allowed(self, origin: str, scope: Scope) -> bool:
        if "*" in self._allowed or origin in self._allowed:
            return True
        if LOCAL_PAGES in self._allowed and re.fullmatch(LOCAL_ORIGIN, origin):
            return True
        try:
            named = urlsplit(origin)
        except ValueError:
            return False
        own = f"{scope.get('scheme', 'http')}://{(header(scope, b'host') or '').lower()}"
        return bool(named.netloc) and origin == own
