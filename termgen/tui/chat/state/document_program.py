"""The helper program of `documents`: turns the bytes of a PDF file or a web page into text."""

from __future__ import annotations

import io
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))  # independent of the working directory

from termgen.errors import RequestError
from termgen.system.helper_process import answer_questions

try:
    import resource
except ImportError:  # Windows: only the time limit applies
    resource = None  # type: ignore[assignment]

MEMORY_LIMIT_BYTES = 2 * 2**30
MAX_TEXT_BYTES = 2 * 2**20
"""What may go with a question; more is not read."""
MAX_PAGES = 5000
_CHARSET = re.compile(rb"charset=[\"']?([\w-]{2,40})", re.IGNORECASE)
_BLANK_LINES = re.compile(r"\n{3,}")


def answer(task: tuple[str, str], data: bytes) -> str:
    kind, name = task
    try:
        text = _pdf_text(data, name) if kind == "pdf" else _page_text(data)
    except ImportError as missing:
        raise _fault(
            f"{name} needs the package {missing.name}: pip install 'termgen[files]'"
        ) from None
    text = _BLANK_LINES.sub("\n\n", text.replace("\0", "").encode(errors="replace").decode())
    if not text.strip():
        why = ": its pages may be pictures" if kind == "pdf" else ""
        raise _fault(f"{name} holds no text{why}")
    return text.strip() + "\n"


def _pdf_text(data: bytes, name: str) -> str:
    """The pages, each below its number."""
    import pypdf

    parts, num_chars = list[str](), 0
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise _fault(f"{name} is encrypted: save it without its password")
        for number, page in enumerate(reader.pages, 1):
            if number > MAX_PAGES or num_chars > MAX_TEXT_BYTES:
                raise _fault(f"{name} is too long: {number - 1:,} of its pages fill a question")
            text = page.extract_text().strip()
            if text:
                parts.append(f"[page {number}]\n{text}")
                num_chars += len(text)
    except (RequestError, MemoryError, ImportError):
        raise
    except Exception as error:  # the parser raises whatever a broken file makes it run into
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise _fault(f"{name} is no PDF file that can be read: {words}") from None
    return "\n\n".join(parts)


def _page_text(data: bytes) -> str:
    """The page as markdown, without pictures, scripts and styles."""
    import html2text

    converter: Any = html2text.HTML2Text(bodywidth=0)
    converter.ignore_images = True
    text: str = converter.handle(_decoded(data))
    return text


def _decoded(data: bytes) -> str:
    """Text by its byte order mark, as UTF-8, as the page says, or as browsers take it."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    with suppress(UnicodeDecodeError):
        return data.decode("utf-8-sig")
    named = _CHARSET.search(data[:4096])
    if named is not None:
        with suppress(LookupError, UnicodeDecodeError):
            return data.decode(named[1].decode("ascii"))
    return data.decode("cp1252", "replace")


def _fault(message: str) -> RequestError:
    return RequestError(message, param="attachment")


if __name__ == "__main__":
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer_questions(answer)
