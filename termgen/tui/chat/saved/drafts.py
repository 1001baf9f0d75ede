"""Drafts of terminals that were closed: a file each, beside that of the chats, until one takes it.

A terminal that is gone cannot show what was not sent, as the end of the program does otherwise.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MARK = ".draft-"
READABLE_BY_OWNER = 0o600


def keep_draft(chats: Path, text: str) -> None:
    """Write a draft. An error is not reported: there is no screen left."""
    path = chats.with_name(f"{chats.name}{MARK}{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(path, flags, READABLE_BY_OWNER), "wb") as file:
            file.write(text.encode(errors="replace"))


def take_draft(chats: Path) -> str:
    """The newest draft, which no other chat gets then; empty without one."""
    for path in sorted(chats.parent.glob(f"{chats.name}{MARK}*"), key=_time, reverse=True):
        with suppress(OSError):  # another chat may have been faster
            text = path.read_bytes().decode(errors="replace")
            path.unlink()
            if text.strip():
                return text
    return ""


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
