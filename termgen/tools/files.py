"""The built-in tools: list, read and search text files below a folder, and nothing else.

Read-only, and never outside of the folder: a path is resolved first, links included, and refused
where that leads out. Devices, pipes and large or binary files are refused as well. All work is
done in a thread, with bounds of size and time.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from termgen.tools.text import amount
from termgen.tools.toolbox import Tool, ToolError

NAME = "files"
MAX_FILE_BYTES = 4 << 20
MAX_LINES = 2000
"""Lines that one call reads at most."""
MAX_READ_CHARS = 200_000
MAX_LISTED = 500
MAX_FOUND = 200
MAX_VISITED = 20_000
"""Files and folders that one call looks at."""
MAX_LINE_CHARS = 400
"""Characters of a line that is found."""
MAX_PATTERN_CHARS = 200
SEARCH_S = 10.0
SKIPPED = frozenset({".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", ".tox"})
"""Folders that a search does not enter."""

_PATH = {"type": "string", "description": "Path below the working folder"}
LIST_SCHEMA = {
    "type": "object",
    "properties": {"path": {**_PATH, "description": "Folder to list, '.' by default"}},
    "additionalProperties": False,
}
READ_SCHEMA = {
    "type": "object",
    "properties": {
        "path": _PATH,
        "first_line": {"type": "integer", "minimum": 1, "description": "Line to begin at"},
        "num_lines": {"type": "integer", "minimum": 1, "maximum": MAX_LINES},
    },
    "required": ["path"],
    "additionalProperties": False,
}
SEARCH_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Text that lines must have; case is ignored"},
        "path": {**_PATH, "description": "Folder to search, '.' by default"},
        "names": {"type": "string", "description": "Pattern of file names, such as *.py"},
    },
    "required": ["text"],
    "additionalProperties": False,
}


class FileTools:
    """A `Provider` of the files below one folder."""

    name = NAME

    def __init__(self, folder: Path) -> None:
        self._root = Path(os.path.realpath(folder))
        self.tools = (
            Tool(
                name="list",
                description="List the files and folders in a folder, with sizes in bytes.",
                schema=LIST_SCHEMA,
                call=self._in_thread(self._list, LIST_SCHEMA),
            ),
            Tool(
                name="read",
                description="Read a text file. Lines come with their numbers.",
                schema=READ_SCHEMA,
                call=self._in_thread(self._read, READ_SCHEMA),
            ),
            Tool(
                name="search",
                description="Find the lines that contain a text, in all text files of a folder.",
                schema=SEARCH_SCHEMA,
                call=self._in_thread(self._search, SEARCH_SCHEMA),
            ),
        )

    @property
    def state(self) -> str:
        return f"reads below {self._root}"

    async def start(self) -> None:
        """Nothing is to be started."""

    async def refresh(self) -> None:
        """The tools stay the same."""

    async def restart(self) -> None:
        """Nothing is to be started."""

    async def close(self) -> None:
        """Nothing is to be ended."""

    def _in_thread(
        self, function: Callable[[dict[str, Any], _Limits], str], schema: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], Any]:
        async def call(arguments: dict[str, Any]) -> str:
            _check_arguments(arguments, schema)
            limits = _Limits()
            try:
                return await asyncio.to_thread(function, arguments, limits)
            except OSError as error:
                raise ToolError(f"{_shown(arguments)}: {error.strerror or error}") from None
            finally:
                limits.stop.set()  # a call that was cancelled leaves its thread

        return call

    # -- in a thread -----------------------------------------------------------------------

    def _resolved(self, given: str) -> Path:
        """The real path. Raises `ToolError` for one outside of the folder."""
        if "\0" in given:
            raise ToolError("path: it has a NUL")
        real = Path(os.path.realpath(self._root / given))
        if real != self._root and self._root not in real.parents:
            raise ToolError(f"path: {given!r:.200} is not below the working folder")
        return real

    def _list(self, arguments: dict[str, Any], limits: _Limits) -> str:
        folder = self._resolved(arguments.get("path", "."))
        lines = []
        with os.scandir(folder) as entries:
            for entry in entries:
                limits.visit()
                lines.append(_listed(entry))
        lines.sort()
        more = len(lines) - MAX_LISTED
        if more > 0:
            lines[MAX_LISTED:] = [f"... {amount(more)} more"]
        return "\n".join(lines) or "The folder is empty."

    def _read(self, arguments: dict[str, Any], limits: _Limits) -> str:
        text = _text_of(self._resolved(arguments["path"]))
        lines = text.splitlines()
        first = arguments.get("first_line", 1)
        last = min(len(lines), first - 1 + arguments.get("num_lines", MAX_LINES))
        if first > max(1, len(lines)):
            raise ToolError(f"first_line: the file has {len(lines)} lines")
        shown: list[str] = []
        num_chars = 0
        for number in range(first, last + 1):
            line = f"{number}: {lines[number - 1]}"
            num_chars += len(line) + 1
            if num_chars > MAX_READ_CHARS and shown:
                last = number - 1
                break
            shown.append(line[:MAX_READ_CHARS])
        if last < len(lines):
            shown.append(f"... lines {last + 1} to {len(lines)} follow")
        return "\n".join(shown) or "The file is empty."

    def _search(self, arguments: dict[str, Any], limits: _Limits) -> str:
        wanted = arguments["text"]
        if not wanted or len(wanted) > MAX_PATTERN_CHARS:
            raise ToolError(f"text must have 1 to {MAX_PATTERN_CHARS} characters")
        matcher = re.compile(re.escape(wanted), re.IGNORECASE)
        names = arguments.get("names", "*")
        found: list[str] = []
        folder = self._resolved(arguments.get("path", "."))
        end = ""
        try:
            for path in self._files(folder, limits):
                if fnmatch.fnmatch(path.name, names):
                    found += _matches(path, path.relative_to(self._root), matcher, limits)
                if len(found) >= MAX_FOUND:
                    end = f"... more than {MAX_FOUND} lines have it"
                    break
        except _EnoughError as enough:
            end = f"... {enough}"
        lines = found[:MAX_FOUND] + ([end] if end else [])
        return "\n".join(lines) or "No line has it."

    def _files(self, folder: Path, limits: _Limits) -> Iterator[Path]:
        """Files below a folder, or the file itself. Links are not followed."""
        if not folder.is_dir():
            yield folder
            return
        for where, folders, files in os.walk(folder, followlinks=False):
            folders[:] = sorted(name for name in folders if name not in SKIPPED)
            for name in sorted(files):
                limits.visit()
                path = Path(where, name)
                if not path.is_symlink():
                    yield path


class _EnoughError(ToolError):
    """A bound of one call is reached."""


class _Limits:
    """What one call may take."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._end_s = time.monotonic() + SEARCH_S
        self._num_visited = 0

    def visit(self) -> None:
        self._num_visited += 1
        if self._num_visited > MAX_VISITED:
            raise _EnoughError(f"stopped after {MAX_VISITED:,} files")
        if self.stop.is_set() or time.monotonic() > self._end_s:
            raise _EnoughError(f"stopped after {SEARCH_S:g} s")


def _check_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raises `ToolError` that names the argument: a model may write anything."""
    properties = schema["properties"]
    for name in schema.get("required", ()):
        if name not in arguments:
            raise ToolError(f"{name} is missing")
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"there is no argument {name!r:.100}, only {', '.join(properties)}")
        limits = properties[name]
        if limits["type"] == "string" and not isinstance(value, str):
            raise ToolError(f"{name} must be text")
        if limits["type"] == "integer":
            if type(value) is not int or value < limits.get("minimum", value):
                raise ToolError(f"{name} must be a whole number from {limits['minimum']} on")
            if value > limits.get("maximum", value):
                raise ToolError(f"{name} must be {limits['maximum']} at most")


def _shown(arguments: Mapping[str, Any]) -> str:
    return repr(arguments.get("path", "."))[:200]


def _listed(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return f"{entry.name} (link)"
    if entry.is_dir(follow_symlinks=False):
        return f"{entry.name}/"
    return f"{entry.name} {entry.stat(follow_symlinks=False).st_size}"


def _text_of(path: Path) -> str:
    """The text of a regular file that is not too large. Raises `ToolError`, OSError."""
    # opened before it is looked at, so that it cannot be exchanged; a pipe must not hold it up
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ToolError(f"path: {path.name!r:.200} is not a file")
        if status.st_size > MAX_FILE_BYTES:
            raise ToolError(f"path: the file has more than {MAX_FILE_BYTES >> 20} MiB")
        data = file.read(MAX_FILE_BYTES + 1)[:MAX_FILE_BYTES]
    if b"\0" in data[:8192]:
        raise ToolError("path: the file is not text")
    return data.decode(errors="replace")


def _matches(path: Path, shown: Path, matcher: re.Pattern[str], limits: _Limits) -> Iterator[str]:
    """`path:line: text` of the lines that match; a file that cannot be read has none."""
    try:
        text = _text_of(path)
    except (ToolError, OSError):
        return
    if matcher.search(text) is None:
        return
    num_found = 0
    for number, line in enumerate(text.splitlines(), 1):
        if matcher.search(line):
            yield f"{shown}:{number}: {line.strip()[:MAX_LINE_CHARS]}"
            num_found += 1
            if num_found >= MAX_FOUND:
                return
