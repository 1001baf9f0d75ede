"""PDF files and web pages that go with a question, as text. No Textual.

They come from anywhere, and their parsers have neither limits nor the speed that a screen needs: a
helper process reads each, and one that takes too long, or too much memory, costs its file only.
What was read is kept, so that a file is read once while its question is written and sent.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from termgen.errors import RequestError
from termgen.system.helper_process import HelperFault, HelperProcess, HelperTooSlow

KINDS = {".pdf": "pdf", ".html": "page", ".htm": "page", ".xhtml": "page"}
MAX_BYTES = 64 * 2**20
READ_S = 60.0
MOST_KEPT = 8
PROGRAM = Path(__file__).with_name("document_program.py")

Version = tuple[str, int, int]
"""(real path, time of the last change, size)."""
_read: OrderedDict[Version, str | RequestError] = OrderedDict()
_lock = threading.Lock()
"""Guards `_read`."""


def kind_of(name: str) -> str:
    """`pdf`, `page`, or empty for a file that is text itself."""
    return KINDS.get(Path(name).suffix.lower(), "")


def is_unread(name: str) -> bool:
    """True for a document that takes time to read."""
    if not kind_of(name):
        return False
    try:
        version = _version(Path(name).expanduser())
    except (OSError, ValueError, RuntimeError):
        return False  # reading it says why
    with _lock:
        return version not in _read


def text_of(path: Path, shown: str) -> str:
    """The text of a document; blocks while it is read. Raises RequestError."""
    version = _version(path)
    with _lock:
        found = _read.get(version)
    if found is None:
        try:
            found = _text_of(path, shown)
        except RequestError as error:
            found = error
        with _lock:
            _read[version] = found
            if len(_read) > MOST_KEPT:
                _read.popitem(last=False)
    if isinstance(found, RequestError):
        raise RequestError(str(found), param=found.param)
    return found


def _version(path: Path) -> Version:
    facts = path.stat()
    return os.path.realpath(path), facts.st_mtime_ns, facts.st_size


def _text_of(path: Path, shown: str) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RequestError(f"{shown} is larger than {MAX_BYTES >> 20} MiB", param="attachment")
    helper = HelperProcess(PROGRAM)
    try:
        text: str = helper.ask((kind_of(shown), shown), [data], limit_s=READ_S)
    except HelperFault as fault:
        what = "time" if isinstance(fault, HelperTooSlow) else "memory"
        raise RequestError(f"{shown} takes too much {what} to read", param="attachment") from None
    finally:
        helper.close()
    return text
