"""Servers that a chat asks beside its own model: those of the setting `beside`, and any URL.

A key is sent only to a server whose entry names the variable that holds it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from termgen.errors import ConfigError

if TYPE_CHECKING:
    from termgen.remote.client import RemoteClient

_NAME = re.compile(r"\w[\w.-]*")
KEY_SIGN = "key="
FORM = "NAME=URL [MODEL] [key=VARIABLE]"


@dataclass(frozen=True, slots=True)
class OtherServer:
    url: str
    model: str | None = None
    """None: the server's first."""
    key_variable: str = ""
    """Environment variable that holds its key; empty: it gets none."""


def parse_servers(entries: Iterable[str]) -> dict[str, OtherServer]:
    """The servers of the setting by their names. Raises ConfigError naming a wrong entry."""
    servers: dict[str, OtherServer] = {}
    for entry in entries:
        name, is_there, rest = entry.partition("=")
        name, words = name.strip(), rest.split()
        if not is_there or not _NAME.fullmatch(name) or not words:
            raise _wrong(entry, f"it must be {FORM}")
        if name in servers:
            raise _wrong(entry, "the name is there twice")
        servers[name] = _server_of(words, entry)
    return servers


def _server_of(words: Sequence[str], entry: str) -> OtherServer:
    url, *others = words
    keys = [word.removeprefix(KEY_SIGN) for word in others if word.startswith(KEY_SIGN)]
    models = [word for word in others if not word.startswith(KEY_SIGN)]
    if len(keys) > 1 or len(models) > 1 or "" in keys:
        raise _wrong(entry, f"it must be {FORM}")
    if "://" not in url:
        raise _wrong(entry, f"{url} is no URL: it begins with http:// or https://")
    return OtherServer(url, models[0] if models else None, "".join(keys))


def _wrong(entry: str, why: str) -> ConfigError:
    return ConfigError(f"beside {entry!r:.80}: {why}", param="beside")


class OtherServers:
    """`OtherModels` of a chat."""

    def __init__(
        self,
        entries: Iterable[str],
        *,
        own_url: str | None = None,
        own_key: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """own_url: the server that the chat is with, whose other models can be asked; None: it has
        an engine of its own. Raises ConfigError."""
        self._servers = parse_servers(entries)
        self._own_url, self._own_key = own_url, own_key
        self._environ = environ

    @property
    def names(self) -> list[tuple[str, str]]:
        """Each name, with what it stands for."""
        return [
            (name, " ".join(filter(None, (server.url, server.model))))
            for name, server in self._servers.items()
        ]

    async def open(self, wanted: str) -> RemoteClient:
        """A client by a name, by `URL [MODEL]`, or by the name of another model of the chat's own
        server. Raises TermgenError."""
        from termgen.remote.client import RemoteClient

        server, key = self._servers.get(wanted), None
        if server is None and "://" in wanted:
            server = _server_of(wanted.split(), wanted)
        if server is None and self._own_url is not None:
            server, key = OtherServer(self._own_url, wanted), self._own_key
        if server is None:
            known = f"those of the setting `beside` are {', '.join(self._servers)}"
            known = known if self._servers else "the setting `beside` names none"
            raise ConfigError(f"no server is called {wanted!r:.60}: {known}", param="beside")
        if server.key_variable:
            key = self._environ.get(server.key_variable, "").strip() or None
            if key is None:
                raise ConfigError(
                    f"beside {wanted}: the variable {server.key_variable} is not set, which has "
                    "its key",
                    param="beside",
                )
        return await RemoteClient.connect(server.url, api_key=key, model=server.model)
