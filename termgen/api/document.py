"""Writes the parameter tables of docs/api.md from the declarations: `python -m termgen.api.document
FILE`.

It replaces the text between pairs of markers, and leaves the prose around them as it is. A test
fails when the page is not up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, inspect

from termgen.api.chat import CHAT
from termgen.api.chat_bridge import SHARED_FIELDS
from termgen.api.completions import COMPLETIONS
from termgen.api.embeddings import EMBEDDINGS
from termgen.api.fields import Declared, Endpoint, Group

ENDPOINTS: Mapping[str, Endpoint] = {"chat": CHAT, "completions": COMPLETIONS}

VALUES: Mapping[type[inspect.Type], str] = {
    inspect.BoolType: "true, false",
    inspect.StrType: "a string",
    inspect.ListType: "a list",
}

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def parameters() -> str:
    return "\n".join(map(_table, Group))


def embeddings() -> str:
    rows = []
    for name, field in EMBEDDINGS.fields.items():
        assert field.doc is not None, f"{name} has no documentation"
        cells = (f"`{name}`", *_words(field), field.doc.meaning, field.doc.origin)
        rows.append("| " + " | ".join(cells) + " |")
    head = ["| field | values | default | what it does | from |", "| --- " * 5 + "|"]
    return "\n".join([*head, *rows, ""])


def _words(field: Declared) -> tuple[str, str]:
    """Values and default."""
    assert field.doc is not None
    return field.doc.values or _values(field), field.doc.default or _default(field.default)


def _table(group: Group) -> str:
    rows = []
    for name, field in (CHAT.fields | COMPLETIONS.fields).items():
        assert field.doc is not None, f"{name} has no documentation"
        if field.doc.group is group:
            endpoints = [words for words, body in ENDPOINTS.items() if name in body.fields]
            where = "both" if len(endpoints) == 2 else endpoints[0]
            cells = (f"`{name}`", where, *_words(field), field.doc.meaning, field.doc.origin)
            rows.append("| " + " | ".join(cells) + " |")
    head = ["| field | where | values | default | what it does | from |"]
    return "\n".join([f"### {group.value}", "", *head, "| --- " * 6 + "|", *rows, ""])


def _values(field: Declared) -> str:
    """The values of a type that needs no other words."""
    if field.bounds is not None:
        return "{} to {}".format(*field.bounds)
    return ", ".join(VALUES[type.__class__] for type in field.types)


def _default(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if value is NODEFAULT:
        return "required"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def ignored() -> str:
    lines = [f"- Both endpoints: {_names(COMPLETIONS.harmless)}."]
    only = CHAT.harmless - COMPLETIONS.harmless
    if only:
        lines.append(f"- Chat too: {_names(only)}.")
    return "\n".join([*lines, ""])


def refused() -> str:
    shared = CHAT.refused.keys() & COMPLETIONS.refused.keys()
    lines = [f"- Both endpoints: {_names(shared)}."]
    for endpoint, words in ((CHAT, "Chat"), (COMPLETIONS, "Completions")):
        lines.append(f"- {words} too: {_names(endpoint.refused.keys() - shared)}.")
    return "\n".join([*lines, ""])


def shared() -> str:
    """Names of the chat's fields that /v1/messages and /v1/responses take as they are."""
    return f"{_names(SHARED_FIELDS)}.\n"


def _names(names: frozenset[str] | set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


PARTS: Mapping[str, Callable[[], str]] = {
    "parameters": parameters,
    "embeddings": embeddings,
    "ignored": ignored,
    "refused": refused,
    "shared": shared,
}


def rewritten(page: str) -> str:
    """The page with every generated part written anew."""
    return _PART.sub(lambda m: m[1] + PARTS[m[2]]() + m[3], page)


def main(path: Path) -> None:
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
