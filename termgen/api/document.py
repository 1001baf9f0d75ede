"""Writes the parameter tables of docs/api.md from the code: `python -m termgen.api.document FILE`.

Only what lies between a pair of markers is written, so the rest of the page is prose. A test fails
when the file is not what this would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from termgen.api.chat import CHAT_HARMLESS, CHAT_REFUSED
from termgen.api.chat_bridge import SHARED_FIELDS
from termgen.api.completions import COMPLETION_REFUSED
from termgen.api.fields import Check
from termgen.api.parameter_types import CHAT, COMPLETIONS, Group, Parameter
from termgen.api.parameters import GROUPS, described
from termgen.api.sampling import HARMLESS

REFUSED: Mapping[str, Mapping[str, Check]] = {CHAT: CHAT_REFUSED, COMPLETIONS: COMPLETION_REFUSED}
IGNORED: Mapping[str, frozenset[str]] = {CHAT: CHAT_HARMLESS, COMPLETIONS: HARMLESS}

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def taken(endpoint: str) -> dict[str, Parameter]:
    """The described fields that an endpoint takes."""
    off = REFUSED[endpoint].keys() | IGNORED[endpoint]
    return {name: p for name, p in described(endpoint).items() if name not in off}


def parameters() -> str:
    return "\n".join(filter(None, map(_table, GROUPS)))


def _table(group: Group) -> str:
    rows = []
    for p in group.parameters:
        endpoints = [name for name in p.endpoints if p.name in taken(name)]
        if endpoints:
            where = "both" if len(endpoints) == 2 else endpoints[0]
            cells = (f"`{p.name}`", where, p.values, p.default, p.meaning, p.origin)
            rows.append("| " + " | ".join(cells) + " |")
    if not rows:
        return ""
    head = ["| field | where | values | default | what it does | from |"]
    return "\n".join([f"### {group.title}", "", *head, "| --- " * 6 + "|", *rows, ""])


def ignored() -> str:
    lines = [f"- Both endpoints: {_names(IGNORED[COMPLETIONS])}."]
    only = IGNORED[CHAT] - IGNORED[COMPLETIONS]
    if only:
        lines.append(f"- Chat too: {_names(only)}.")
    return "\n".join([*lines, ""])


def refused() -> str:
    shared = REFUSED[CHAT].keys() & REFUSED[COMPLETIONS].keys()
    lines = [f"- Both endpoints: {_names(shared)}."]
    for endpoint, words in ((CHAT, "Chat"), (COMPLETIONS, "Completions")):
        only = REFUSED[endpoint].keys() - shared
        lines.append(f"- {words} too: {_names(only)}.")
    return "\n".join([*lines, ""])


def shared() -> str:
    """What the endpoints that are a chat in other words take by the chat's own names."""
    return f"{_names(set(SHARED_FIELDS))}.\n"


def _names(names: frozenset[str] | set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


PARTS: Mapping[str, Callable[[], str]] = {
    "parameters": parameters,
    "ignored": ignored,
    "refused": refused,
    "shared": shared,
}


def rewritten(page: str) -> str:
    """The page with every generated part as the code has it now."""
    return _PART.sub(lambda m: m[1] + PARTS[m[2]]() + m[3], page)


def main(path: Path) -> None:
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
