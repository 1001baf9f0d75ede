"""Chats as files that people name, for `/export` and `/import`. Not for the event loop."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from termgen.errors import ChatStoreError
from termgen.tui.chat_records import SessionRecord, TurnRecord, from_json

MAX_IMPORT_BYTES = 64 << 20
FORMS = ("md", "json")
USAGE = "/export [md|json] PATH; -f first writes over a file"


@dataclass(frozen=True, slots=True)
class ExportWish:
    path: Path
    form: str
    may_replace: bool = False


def parse_export(argument: str) -> ExportWish:
    """`[-f] [md|json] PATH`; without a form the path's ending tells it. `ChatStoreError` else."""
    first, _, rest = argument.partition(" ")
    may_replace = first == "-f"
    if may_replace:
        first, _, rest = rest.strip().partition(" ")
    named = first in FORMS and bool(rest.strip())
    path = user_path(rest if named else f"{first} {rest}")
    form = first if named else path.suffix.lower().removeprefix(".").replace("markdown", "md")
    if not path.name or form not in FORMS:
        raise ChatStoreError(USAGE)
    return ExportWish(path, form, may_replace)


def user_path(text: str) -> Path:
    """A path as a person writes it. Raises `ChatStoreError`."""
    try:
        return Path(text.strip()).expanduser()
    except RuntimeError:  # nobody's home
        raise ChatStoreError(f"{text.strip()} is not a path") from None


def write_new(wish: ExportWish, text: str) -> bool:
    """Write the file, all of it or nothing; returns whether there was one before."""
    path = wish.path
    if "\0" in str(path):
        raise ChatStoreError("a path has no NUL in it")
    replaced = path.exists()
    if replaced and not wish.may_replace:
        raise ChatStoreError(f"{path} is there already; /export -f {wish.form} {path} replaces it")
    part = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        # what is not UTF-8 may come from an import made by hand
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ChatStoreError(f"{path} cannot be written: {error.strerror}") from None
    return replaced


def read_chat(path: Path) -> tuple[SessionRecord, list[TurnRecord]]:
    """An export, with ids of its own so that it stands beside the chat it came from."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a device or a pipe may never end
            raise ChatStoreError(f"{path} cannot be read: it is not a file")
        with path.open("rb") as file:
            raw = file.read(MAX_IMPORT_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ChatStoreError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ChatStoreError(f"{path} cannot be imported: it is not UTF-8 text") from None
    except ValueError as error:  # a NUL
        raise ChatStoreError(f"{path} cannot be read: {error}") from None
    if len(raw) > MAX_IMPORT_BYTES:
        raise ChatStoreError(f"{path} is larger than {MAX_IMPORT_BYTES >> 20} MiB")
    try:
        session, turns = from_json(text)
    except ChatStoreError as error:
        raise ChatStoreError(f"{path} cannot be imported: {error}") from None
    fresh = {turn.turn_id: uuid4().hex for turn in turns}
    session_id = uuid4().hex
    return replace(session, session_id=session_id), [
        replace(
            turn,
            turn_id=fresh[turn.turn_id],
            session_id=session_id,
            parent_id=fresh.get(turn.parent_id or ""),
        )
        for turn in turns
    ]
