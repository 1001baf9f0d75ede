"""Files that go with a question: found, read, checked, and written out for the model.

Used by the chat. Faults are `RequestError`s of one line. No Textual.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from termgen.errors import RequestError
from termgen.tui.chat.state import documents

MAX_BYTES = 2 * 1024 * 1024
"""Size of all files of one question together: about half a million tokens."""
MAX_FILES = 20
MAX_LISTED = 5000
"""Files that completion knows of below the working folder."""
MAX_SHOWN = 8
MAX_SCANNED = 20_000
"""Entries of folders, for the sake of disks that are slow and folders without end."""
SKIPPED_FOLDERS = frozenset(("node_modules", "__pycache__", "venv", "target", "dist", "build"))

_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_LIKE_A_FILE = re.compile(r"/|\w\.\w{1,8}$")
_AFTER_A_NAME = ".,;:!?)"
_OPEN_MENTION = re.compile(r'(?<!\S)@("[^"\n]*|[^\s"]*)$')
_FENCE = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Attachment:
    name: str
    """The path as the user wrote it; the model sees it too."""
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


def mentions(text: str) -> list[str]:
    """Paths of `@path` and `@"path with blanks"` that are files; other words with `@` are text."""
    found = (_named(quoted or bare) for quoted, bare in _MENTION.findall(text))
    return list(dict.fromkeys(name for name in found if name))


def missing(text: str) -> list[str]:
    """Words with `@` that look like paths, by a quote, a slash or a file's ending, but are no
    files."""
    names = [
        quoted or bare.rstrip(_AFTER_A_NAME)
        for quoted, bare in _MENTION.findall(text)
        if not _named(quoted or bare)
        and (quoted or _LIKE_A_FILE.search(bare.rstrip(_AFTER_A_NAME)))
    ]
    return list(dict.fromkeys(names))


def _named(path: str) -> str:
    """The file that a mention names; empty if there is none."""
    # `see @a.py, please`: punctuation behind a path is part of it only if there is such a file.
    return next(
        (name for name in (path, path.rstrip(_AFTER_A_NAME)) if name and _is_file(name)), ""
    )


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # a name too long, a NUL, an unknown home
        return False


def version_of(name: str) -> tuple[int, int]:
    """Bytes of a file, and when it was last written in ns; zeros if it has just gone."""
    try:
        found = Path(name).expanduser().stat()
    except (OSError, ValueError, RuntimeError):
        return 0, 0
    return found.st_size, found.st_mtime_ns


def read_file(name: str) -> Attachment:
    """A whole text file, of at most `MAX_BYTES`, or the text of a document: blocks while that is
    read."""
    shown = name.encode(errors="replace").decode()
    try:
        path = Path(name).expanduser()
        if not stat.S_ISREG(path.stat().st_mode):  # reading a device or a pipe may never end
            raise _fault(f"{shown} is not a file")
        if documents.kind_of(name):
            return Attachment(shown, documents.text_of(path, shown))
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (ValueError, RuntimeError):
        raise _fault(f"{shown} is not a path") from None
    except OSError as error:
        raise _fault(f"{shown}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise _fault(f"{shown} is larger than {_size(MAX_BYTES)}")
    if b"\0" in data:
        raise _fault(f"{shown} is a binary file; only text can be attached")
    try:
        return Attachment(shown, data.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError:
        raise _fault(f"{shown} is not UTF-8 text") from None


def pasted_file(text: str, taken: Iterable[str]) -> Attachment:
    """A long paste, under the first name that is free."""
    names = set(taken)
    name = next(n for i in count(1) if (n := f"pasted-{i}.txt") not in names)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Attachment(name, text.encode(errors="replace").decode())


def check(attachments: Sequence[Attachment]) -> None:
    """Check that the files may go with one question together. Raises RequestError."""
    if len(attachments) > MAX_FILES:
        raise _fault(f"{len(attachments)} files; at most {MAX_FILES} go with a question")
    total = sum(attachment.num_bytes for attachment in attachments)
    if total > MAX_BYTES:
        raise _fault(
            f"the attached files have {_size(total)}; at most {_size(MAX_BYTES)} go with a question"
        )


def merged(attachments: Iterable[Attachment]) -> tuple[Attachment, ...]:
    """One attachment for each name: the last one."""
    return tuple({attachment.name: attachment for attachment in attachments}.values())


def with_files(question: str, attachments: Sequence[Attachment]) -> str:
    """The text for the model: each file as a fenced block below its name, then the question. Files
    come first, so that another question on the same files finds them in the prefix cache."""
    return "\n\n".join([*map(with_name, attachments), question])


def with_name(attachment: Attachment) -> str:
    """A fenced block below the file's name."""
    return fenced(attachment.name, attachment.text, _language(attachment.name))


def fenced(name: str, text: str, language: str = "") -> str:
    """A text below its name, in a fence that none within it ends."""
    longest = max((len(ticks) for ticks in _FENCE.findall(text)), default=2)
    fence = "`" * (longest + 1)
    text = text.removesuffix("\n")
    return f"{name}:\n{fence}{language}\n{text}\n{fence}"


def _language(name: str) -> str:
    if documents.kind_of(name):
        return ""
    suffix = Path(name).suffix[1:]
    return suffix if suffix.isalnum() else ""


def _fault(message: str) -> RequestError:
    return RequestError(message, param="attachment")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024 / 1024:.1f} MiB"


def open_mention(before: str) -> str | None:
    """The path being written in the text before the cursor, without `@` and quotes."""
    found = _OPEN_MENTION.search(before)
    return found[1].removeprefix('"') if found else None


def files_below(folder: Path) -> list[str]:
    """Files that may be meant, nearest first; hidden ones and what tools make are left out."""
    found: list[str] = []
    level = [folder]
    num_scanned = 0
    while level:
        below: list[Path] = []
        for place in level:
            if len(found) >= MAX_LISTED or num_scanned >= MAX_SCANNED:
                return found[:MAX_LISTED]
            entries = _entries(place)
            num_scanned += 1 + len(entries)
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in SKIPPED_FOLDERS:
                        below.append(Path(entry.path))
                else:
                    found.append(os.path.relpath(entry.path, folder))
        level = below
    return found[:MAX_LISTED]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(islice(entries, MAX_SCANNED), key=lambda entry: entry.name.lower())
    except OSError:
        return []


def completions(partial: str, files: Sequence[str]) -> list[str]:
    """Completions of a partial path: below the working folder by any part, elsewhere by folder."""
    if partial.startswith(("/", "~", "..")):
        return _in_folder(partial)
    wanted = partial.lower()

    def rank(path: str) -> int:
        low = path.lower()
        if low.startswith(wanted):
            return 0
        if os.path.basename(low).startswith(wanted):
            return 1
        return 2 if wanted in low else 3

    ranked = sorted((rank(path), index) for index, path in enumerate(files))
    return [files[index] for value, index in ranked[:MAX_SHOWN] if value < 3]


def _in_folder(partial: str) -> list[str]:
    folder, begin = os.path.split(partial)
    try:
        entries = _entries(Path(folder or partial).expanduser())
    except RuntimeError:  # an unknown user: ~name
        return []
    matching = [
        entry
        for entry in entries
        if entry.name.lower().startswith(begin.lower())
        and (begin.startswith(".") or not entry.name.startswith("."))
    ]
    return [
        os.path.join(folder, entry.name + ("/" if entry.is_dir() else ""))
        for entry in matching[:MAX_SHOWN]
    ]


def as_mention(path: str) -> str:
    return f'@"{path}"' if re.search(r"\s", path) else f"@{path}"
