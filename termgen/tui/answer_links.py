"""The links of an answer, as they are shown."""

from __future__ import annotations

from itertools import groupby
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
        for address, spans in groupby(row, lambda span: span[1].partition(" ")[2]):
            if address:
                text = "".join(text for text, role in spans if not role.startswith("muted"))
                texts.setdefault(address, text or address)
    return [Link(text, address) for address, text in texts.items()]
