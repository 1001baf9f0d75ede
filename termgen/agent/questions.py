"""A prompt's blocks as a question with files, and a session's MCP servers as the tools take them.

Faults are `acp.RequestError`s that name the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from acp.schema import (
    AcpMcpServer,
    EmbeddedResourceContentBlock,
    HttpMcpServer,
    McpServerStdio,
    ResourceContentBlock,
    SseMcpServer,
    TextContentBlock,
    TextResourceContents,
)
from pydantic import BaseModel, ValidationError

from termgen.agent.faults import invalid
from termgen.config import TOOLS
from termgen.errors import ConfigError, RequestError
from termgen.tools.server_config import McpServer, read_servers
from termgen.tui.chat.saved.chat_records import plain_text
from termgen.tui.chat.state import attachments as files
from termgen.tui.chat.state.attachments import Attachment

MAX_NAME_CHARS = 32
SHAPES: Mapping[str, type[BaseModel]] = {
    "stdio": McpServerStdio,
    "http": HttpMcpServer,
    "sse": SseMcpServer,
    "acp": AcpMcpServer,
}
"""Kinds of MCP servers."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")


def question_of(blocks: Sequence[Any], folder: Path) -> tuple[str, tuple[Attachment, ...]]:
    """The question of a prompt, and the files that go with it. A file stands in the question as
    `@name`. folder: the session's, below which files have short names."""
    words: list[str] = []
    found: list[Attachment] = []
    for number, block in enumerate(blocks):
        where = f"prompt[{number}]"
        if isinstance(block, TextContentBlock):
            words.append(plain_text(block.text))
        elif isinstance(block, EmbeddedResourceContentBlock):
            found.append(_embedded(block, where, folder))
            words.append(files.as_mention(found[-1].name))
        elif isinstance(block, ResourceContentBlock):
            linked = _linked(block, where, folder)
            found += [linked] if isinstance(linked, Attachment) else []
            name = linked.name if isinstance(linked, Attachment) else ""
            words.append(files.as_mention(name) if name else str(linked))
        else:
            raise invalid(f"{where}: {block.type}: no model here reads it; send text or a file")
    question = "".join(words).strip()
    if not question:
        raise invalid("prompt: it has no text")
    together = files.merged(found)
    try:
        files.check(together)
    except RequestError as error:
        raise invalid(f"prompt: {error}") from None
    return question, together


def _embedded(block: EmbeddedResourceContentBlock, where: str, folder: Path) -> Attachment:
    resource = block.resource
    if not isinstance(resource, TextResourceContents):
        raise invalid(f"{where}: resource: {resource.uri!r:.200} is binary; only text can be read")
    path = _path_of(resource.uri)
    name = resource.uri if path is None else _name_of(path, folder)
    return Attachment(plain_text(name), plain_text(resource.text).replace("\r\n", "\n"))


def _linked(block: ResourceContentBlock, where: str, folder: Path) -> Attachment | str:
    """The file that a link names, or words for a link that names none."""
    path = _path_of(block.uri)
    if path is None or path.is_dir():
        return plain_text(f"{block.name} ({block.uri})")
    try:
        file = files.read_file(str(path))
    except RequestError as error:
        raise invalid(f"{where}: resource_link: {error}") from None
    return replace(file, name=plain_text(_name_of(path, folder)))


def _path_of(uri: str) -> Path | None:
    """The path of a `file` URI, or of a path that stands for one."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme == "file":
        path = unquote(parts.path)
    elif not parts.scheme and uri.startswith("/"):
        path = uri
    else:
        return None
    return Path(path) if "\0" not in path else None


def _name_of(path: Path, folder: Path) -> str:
    try:
        return str(path.relative_to(folder))
    except ValueError:
        return str(path)


def folder_of(cwd: str, others: Sequence[str] | None) -> Path:
    """The folder of a session."""
    if others:
        raise invalid("additionalDirectories: a session has one folder here, its cwd")
    if "\0" in cwd or not Path(cwd).is_absolute():
        raise invalid(f"cwd: {cwd!r:.200} is not an absolute path")
    if not Path(cwd).is_dir():
        raise invalid(f"cwd: {cwd!r:.200} is not a folder on this machine")
    return Path(cwd)


def fault_of_servers(message: Mapping[str, Any]) -> str:
    """What is wrong with the MCP servers of a request: the package leaves such out silently."""
    params = message.get("params")
    given = params.get("mcpServers") if isinstance(params, dict) else None
    for number, one in enumerate(given if isinstance(given, list) else ()):
        kind = one.get("type", "stdio") if isinstance(one, dict) else "stdio"
        shape = SHAPES.get(kind) if isinstance(kind, str) else None
        if shape is None:
            return f"mcpServers[{number}].type: there is no {kind!r:.100}"
        try:
            shape.model_validate(one)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = "".join(f".{part}" for part in first["loc"])
            return f"mcpServers[{number}]{where}: {first['msg']}"
    return ""


def servers_of(given: Sequence[Any] | None, folder: Path) -> tuple[McpServer, ...]:
    """The MCP servers of a new session, held to the rules of those in the config file. Variables
    that they name with `${NAME}` are not looked up: the client has put in what it wants."""
    servers: list[McpServer] = []
    for number, one in enumerate(given or ()):
        where = f"mcpServers[{number}]"
        table: dict[str, Any]
        if isinstance(one, McpServerStdio):
            table = {"command": [one.command], "args": one.args}
            table["env"] = {each.name: each.value for each in one.env}
        elif isinstance(one, HttpMcpServer):
            table = {"url": one.url}
            table["headers"] = {each.name: each.value for each in one.headers}
        else:
            raise invalid(f"{where}: {one.type}: a server is a command or has an address in http")
        name = _free_name(one.name, {server.name for server in servers})
        try:
            (server,) = read_servers(where, {name: table})
        except ConfigError as error:
            raise invalid(str(error)) from None
        servers.append(replace(server, is_literal=True, folder=folder))
    return tuple(servers)


def _free_name(wanted: str, taken: set[str]) -> str:
    """A name that the tools' names can begin with, and that no other server has."""
    base = _NOT_IN_NAMES.sub("_", wanted)[:MAX_NAME_CHARS].strip("_") or "server"
    name, number = base, 1
    while name in taken or name in TOOLS:
        number += 1
        end = f"_{number}"
        name = base[: MAX_NAME_CHARS - len(end)] + end
    return name
