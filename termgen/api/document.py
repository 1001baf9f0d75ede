"""Writes the parameter tables of docs/api.md from the code: `python -m termgen.api.document FILE`.

Only what lies between a pair of markers is written, so the rest of the page is prose. A test fails
when the file is not what this would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from termgen.api.chat import CHAT
from termgen.api.chat_bridge import SHARED_FIELDS
from termgen.api.completions import COMPLETIONS
from termgen.api.fields import Doc, Endpoint, Group

ENDPOINTS: Mapping[str, Endpoint] = {"chat": CHAT, "completions": COMPLETIONS}

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def documented() -> Mapping[str, tuple[Doc, list[str]]]:
    """The fields of both endpoints by name, each with the endpoints that have it."""
    found: dict[str, tuple[Doc, list[str]]] = {}
    for endpoint, body in ENDPOINTS.items():
        for name, field in body.fields.items():
            assert field.doc is not None, f"{name} has no documentation"
            found.setdefault(name, (field.doc, []))[1].append(endpoint)
    return found


def parameters() -> str:
    return "\n".join(map(_table, Group))


def _table(group: Group) -> str:
    rows = []
    for name, (doc, endpoints) in documented().items():
        if doc.group is group:
            where = "both" if len(endpoints) == 2 else endpoints[0]
            cells = (f"`{name}`", where, doc.values, doc.default, doc.meaning, doc.origin)
            rows.append("| " + " | ".join(cells) + " |")
    head = ["| field | where | values | default | what it does | from |"]
    return "\n".join([f"### {group.value}", "", *head, "| --- " * 6 + "|", *rows, ""])


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
    """Fields of a chat that the endpoints which are a chat in other words take as they are."""
    return f"{_names(SHARED_FIELDS)}.\n"


def _names(names: frozenset[str] | set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


PARTS: Mapping[str, Callable[[], str]] = {
    "parameters": parameters,
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
