"""Files that a start computes and a later one reads again, in the user's cache folder.

Only what can be made anew is kept there. An entry is read if it is whole and no other user could
have written it: compiled code is among the entries. Everything else counts as missing, and a folder
that cannot be written is left alone.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_DIGEST_BYTES = hashlib.sha256().digest_size
_HAS_OWNERS = os.name == "posix"
_HERE = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def cache_root() -> Path:
    """TERMGEN_CACHE, or the user's cache folder."""
    root = os.environ.get("TERMGEN_CACHE")
    if not root:
        from platformdirs import user_cache_dir

        root = user_cache_dir("termgen", appauthor=False)
    return Path(root).expanduser()


def digest(*parts: object) -> str:
    """The name of an entry that is made from these parts: bytes, or what `repr` shows whole."""
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class UserCache:
    """One folder of entries below the cache root. Never raises OSError."""

    name: str
    most_entries: int
    """The oldest beyond this number are removed when one is written."""

    @property
    def folder(self) -> Path:
        return cache_root() / self.name

    def read(self, entry: str) -> bytes | None:
        """An entry's content; None if it is missing, not whole, or others could have written it."""
        with suppress(OSError), _Folder(self.folder) as folder:
            content = folder.read(entry)
            whole, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(data).digest() == whole:
                return data
        return None

    def write(self, entry: str, data: bytes) -> None:
        """Keep a content. It appears whole or not at all."""
        with suppress(OSError):
            self.folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            with _Folder(self.folder) as folder:
                folder.write(entry, hashlib.sha256(data).digest() + data)
                folder.shrink(self.most_entries)


class _Folder:
    """A folder that belongs to this user alone. Its files are opened relative to it, so that
    another folder in its place is never read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> _Folder:
        if _HAS_OWNERS:
            self._fd = os.open(self._path, _HERE)
            try:
                _check_owned(self._fd)
            except BaseException:
                os.close(self._fd)
                raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def _place(self, name: str) -> str | Path:
        return self._path / name if self._fd is None else name

    def read(self, name: str) -> bytes:
        with open(os.open(self._place(name), _READ, dir_fd=self._fd), "rb") as file:
            if _HAS_OWNERS:
                _check_owned(file.fileno())
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        part = f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            fd = os.open(self._place(part), _WRITE, PRIVATE_FILE, dir_fd=self._fd)
            with open(fd, "wb") as file:
                file.write(content)
            os.replace(
                self._place(part), self._place(name), src_dir_fd=self._fd, dst_dir_fd=self._fd
            )
        except BaseException:
            with suppress(OSError):
                os.unlink(self._place(part), dir_fd=self._fd)
            raise

    def shrink(self, most: int) -> None:
        names = os.listdir(self._path if self._fd is None else self._fd)
        if len(names) <= most:
            return
        ages = sorted((os.stat(self._place(n), dir_fd=self._fd).st_mtime_ns, n) for n in names)
        for _, name in ages[: len(ages) - most]:
            os.unlink(self._place(name), dir_fd=self._fd)


def _check_owned(fd: int) -> None:
    """Raises PermissionError if another user owns an open file or folder, or could write to it."""
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError("others could have written this")
