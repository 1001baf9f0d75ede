"""MCP servers as the config file describes them, each in a table `[mcp.NAME]`. Standard library
only."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from termgen.config import TOOLS, is_loopback
from termgen.errors import ConfigError

MAX_SERVERS = 32
MAX_TIMEOUT_S = 3600.0
PROTOCOLS = ("auto", "legacy")
KEYS = ("command", "args", "env", "url", "headers", "timeout", "protocol")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """One server: a command to start, or a URL."""

    name: str
    command: tuple[str, ...] = ()
    """The program and its arguments."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables besides the few that every server gets."""
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 60.0
    """Limit of one call."""
    protocol: str = "auto"
    is_literal: bool = False
    """Texts of `env` and `headers` are what they are: `${NAME}` stands for nothing."""
    folder: Path | None = None
    """Working folder of the command; None: that of this program."""


def read_servers(where: str, tables: object) -> tuple[McpServer, ...]:
    """The servers of the config file. Raises `ConfigError` that names the table and the key."""
    if not isinstance(tables, dict):
        raise ConfigError(f"{where}: [mcp] must have tables [mcp.NAME]", param="mcp")
    if len(tables) > MAX_SERVERS:
        raise ConfigError(f"{where}: at most {MAX_SERVERS} tables [mcp.NAME]", param="mcp")
    return tuple(_read_server(where, name, table) for name, table in tables.items())


def _read_server(where: str, name: str, table: object) -> McpServer:
    if not _NAME.fullmatch(name) or name in TOOLS:
        raise ConfigError(
            f"{where}: [mcp.{name}]: a name has 1 to 32 letters, digits, _ and -, and is not "
            f"{', '.join(TOOLS)}",
            param="mcp",
        )
    reader = _Table(f"{where}, [mcp.{name}]", table)
    command, url = reader.command(), reader.url()
    if (url is None) == (not command):
        raise reader.fault("command", "give either a command or a url")
    useless, other = (("args", "env"), "url") if url is not None else (("headers",), "command")
    for key in useless:
        if key in reader.values:
            raise reader.fault(key, f"{key} has no effect with a {other}")
    return McpServer(
        name=name,
        command=command,
        env=reader.texts("env"),
        url=url,
        headers=reader.headers(),
        timeout_s=reader.timeout(),
        protocol=reader.protocol(),
    )


class _Table:
    def __init__(self, where: str, table: object) -> None:
        self._where = where
        if not isinstance(table, dict):
            raise ConfigError(f"{where} must be a table", param="mcp")
        self.values: dict[str, Any] = table
        for key in table:
            if key not in KEYS:
                close = difflib.get_close_matches(key, KEYS, n=1)
                hint = f"; did you mean {close[0]}?" if close else f", only {', '.join(KEYS)}"
                raise self.fault(key, f"unknown key {key!r}{hint}")

    def fault(self, key: str, words: str) -> ConfigError:
        return ConfigError(f"{self._where}: {words}", param=key)

    def command(self) -> tuple[str, ...]:
        given, args = self.values.get("command", []), self.values.get("args", [])
        words = [given] if isinstance(given, str) else given
        for key, value in (("command", words), ("args", args)):
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                raise self.fault(key, f"{key} must be text or a list of texts")
            if any("\0" in word for word in value) or (key == "command" and "" in value):
                raise self.fault(key, f"{key} has an empty word, or a NUL")
        return (*words, *args) if words else ()

    def url(self) -> str | None:
        url = self.values.get("url")
        if url is None:
            return None
        if not isinstance(url, str):
            raise self.fault("url", "url must be text")
        try:
            parts = urlsplit(url)
            host, scheme = parts.hostname or "", parts.scheme
            _ = parts.port
        except ValueError:
            raise self.fault("url", f"url {url!r} is no address") from None
        if scheme not in ("http", "https") or not host:
            raise self.fault("url", f"url {url!r} must begin with https:// or http://")
        if scheme == "http" and not is_loopback(host):
            raise self.fault("url", "url: http is for this machine only; use https")
        return url

    def texts(self, key: str) -> dict[str, str]:
        given = self.values.get(key, {})
        if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
            raise self.fault(key, f"{key} must be a table of texts")
        for name, value in given.items():
            if not name or "=" in name or "\0" in name + value:
                raise self.fault(key, f"{key}: {name!r} cannot be set")
        return given

    def headers(self) -> dict[str, str]:
        given = self.texts("headers")
        for name, value in given.items():
            if not _HEADER.fullmatch(name) or not (value.isascii() and value.isprintable()):
                raise self.fault("headers", f"headers: {name!r} is no header, or its text none")
        return given

    def timeout(self) -> float:
        value = self.values.get("timeout", McpServer.__dataclass_fields__["timeout_s"].default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 < value <= MAX_TIMEOUT_S:
            words = f"timeout must be a number of seconds, up to {MAX_TIMEOUT_S:g}"
            raise self.fault("timeout", words)
        return float(value)

    def protocol(self) -> str:
        value = self.values.get("protocol", "auto")
        if value not in PROTOCOLS:
            raise self.fault("protocol", f"protocol must be one of {', '.join(PROTOCOLS)}")
        return str(value)


def expanded(values: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The texts with the variables that `${NAME}` stands for. Raises `ConfigError` for one that is
    not set."""

    def value_of(found: re.Match[str]) -> str:
        value = environ.get(found[1])
        if value is None:
            raise ConfigError(f"the variable {found[1]} is not set", param=found[1])
        return value

    return {name: _VARIABLE.sub(value_of, text) for name, text in values.items()}
