"""The links of an answer, as they are shown."""

from __future__ import annotations

from typing import NamedTuple

from termgen.tui.markdown import render

WIDTH = 1000
"""So that no text of a link is broken over lines."""


class Link(NamedTuple):
    text: str
    address: str


def links_of(source: str) -> list[Link]:
    """In their order, each address once."""
    texts: dict[str, str] = {}
    for row in render(source, WIDTH):
        for text, role in row:
            address = role.partition(" ")[2]
            if address:
                texts.setdefault(address, text)
    return [Link(text, address) for address, text in texts.items()]
