"""`Remembered`: small choices of the screens that later runs begin with.

They are one JSON object in the user's state folder. Several programs may write it: each changes its
own entries of what is there by then, under a lock, and the file appears whole or not at all. A file
that holds no such object counts as empty, and the first write moves it aside.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FILE = "choices.json"
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
MAX_BYTES = 1 << 16
"""A larger file is none of ours."""
LOCK_S, RETRY_S = 1.0, 0.01
"""How long to wait for another program that writes, and between two looks."""


class Remembered:
    """Blocks for a moment, so a screen calls it from a thread. Never raises OSError: what went
    wrong is in `fault`."""

    def __init__(self, path: Path | None) -> None:
        """path: None remembers nothing."""
        self.path = path
        self.fault = ""
        """What was wrong with the file at the last call; empty if nothing was."""

    @classmethod
    def of_user(cls) -> Remembered:
        from platformdirs import user_state_path

        return cls(user_state_path("termgen") / FILE)

    def read(self) -> dict[str, Any]:
        """All entries; none without a file, or with one that cannot be read."""
        self.fault = ""
        if self.path is None:
            return {}
        try:
            return _entries(self.path)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.fault = f"what earlier runs chose is not known: {self.path}: {error.strerror}"
        except ValueError as error:
            self.fault = f"what earlier runs chose is not known: {self.path} {error}"
        return {}

    def write(self, changes: Mapping[str, Any]) -> None:
        """Set entries, or remove those whose value is None; the others stay as they are."""
        self.fault = ""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            with _locked(self.path.with_name(self.path.name + ".lock")):
                entries = {**self._entries_to_change(), **changes}
                kept = {name: value for name, value in entries.items() if value is not None}
                _put(self.path, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            self.fault = f"the choice is not kept: {self.path}: {error.strerror}"

    def _entries_to_change(self) -> dict[str, Any]:
        assert self.path is not None
        try:
            return _entries(self.path)
        except FileNotFoundError:
            return {}
        except ValueError:
            os.replace(self.path, self.path.with_name(self.path.name + ".broken"))
            return {}


def _entries(path: Path) -> dict[str, Any]:
    """Raises OSError, and ValueError with words that follow the file's name."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe may stand there
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is no file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError("is too large to be termgen's")
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(entries, dict):
        raise ValueError("holds no JSON object")
    return entries


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for other programs that write; BlockingIOError if that takes too long. The lock ends
    with the descriptor, and with a killed program."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
        yield
    finally:
        os.close(descriptor)


def _put(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(part, flags, PRIVATE_FILE), "wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
