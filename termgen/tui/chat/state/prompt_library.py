"""Prompts that the user keeps, as files in the config folder. No Textual.

`{{words}}` in one are variables: their places are filled in before it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from termgen.errors import RequestError

SUFFIX = ".md"
MAX_BYTES = 64 * 1024
MAX_PROMPTS = 500
_NAME = re.compile(r"[\w][\w .-]{0,59}")
VARIABLE = re.compile(r"\{\{\s*[\w][\w .-]{0,59}?\s*\}\}")


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    name: str
    text: str


def folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_config_dir("termgen")) / "prompts"


def kept_prompts() -> list[KeptPrompt]:
    """All prompts, by name. Files that cannot be read, or are not text, are left out."""
    return sorted(_readable(), key=lambda prompt: prompt.name.lower())


def _readable() -> Iterator[KeptPrompt]:
    try:
        files = list(islice(folder().glob(f"*{SUFFIX}"), MAX_PROMPTS))
    except OSError:
        return
    for file in files:
        try:
            with file.open(encoding="utf-8-sig") as opened:
                text = opened.read(MAX_BYTES)
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield KeptPrompt(file.name.removesuffix(SUFFIX), text.strip())


def keep(name: str, text: str) -> Path:
    """Write a prompt into a new file. Raises RequestError."""
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise _fault("a prompt's name is up to 60 letters, digits, blanks, dots, - and _")
    data = (text + "\n").encode(errors="replace")
    if len(data) > MAX_BYTES:
        raise _fault(f"a kept prompt has at most {MAX_BYTES // 1024} KiB")
    path = folder() / f"{name}{SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise _fault(f"there is a prompt {name} already: {path}") from None
    except OSError as error:
        raise _fault(f"the prompt cannot be kept: {error.strerror}") from None
    return path


def next_variable(text: str, after: int) -> tuple[int, int] | None:
    """Begin and end of the next variable from a position on, or of the first one."""
    found = VARIABLE.search(text, after) or VARIABLE.search(text)
    return found.span() if found else None


def unfilled(text: str) -> list[str]:
    """The variables of a text, each once."""
    return list(dict.fromkeys(VARIABLE.findall(text)))


def _fault(message: str) -> RequestError:
    return RequestError(message, param="prompts")
