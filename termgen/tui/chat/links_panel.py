"""The links of an answer, each with its whole address. Gives back one and what to do with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.markdown import render

WIDTH = 1000
"""Wide enough that no link's text is broken over lines."""


class Link(NamedTuple):
    text: str
    address: str


def links_of(source: str) -> list[Link]:
    """The links in their order, each address once."""
    texts: dict[str, str] = {}
    for row in render(source, WIDTH):
        for address, spans in groupby(row, lambda span: span[1].partition(" ")[2]):
            if address:
                text = "".join(text for text, role in spans if not role.startswith("muted"))
                texts.setdefault(address, text or address)
    return [Link(text, address) for address, text in texts.items()]


class LinkChoice(NamedTuple):
    address: str
    is_copied: bool
    """Instead of opened."""


class LinksPanel(ModalScreen[LinkChoice | None]):
    BINDINGS = [
        Binding("enter,o", "take(False)", "Open link", id="links.open", tooltip="Open the link"),
        Binding("y,c", "take(True)", "Copy link", id="links.copy", tooltip="Copy its address"),
        Binding("up,k", "move(-1)", "Link above", id="links.up", tooltip="To the link above"),
        Binding("down,j", "move(1)", "Link below", id="links.down", tooltip="To the link below"),
        Binding("escape,q", "dismiss", "Close", id="links.close", tooltip="Back to the chat"),
    ]

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__()
        assert links, "there is one to choose"
        self._links = links

    def compose(self) -> ComposeResult:
        with Vertical(id="links", classes="panel") as box:
            box.border_title = "links"
            words = (f"{brief_key_of(self, f'links.{n}')} {n}" for n in ("open", "copy", "close"))
            box.border_subtitle = " · ".join(words)
            links = OptionList(*map(_option, self._links), compact=True, markup=False)
            links.can_focus = False  # the keys are this screen's
            yield links

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = 0

    def action_move(self, by: int) -> None:
        links = self.query_one(OptionList)
        links.highlighted = ((links.highlighted or 0) + by) % len(self._links)

    def action_take(self, is_copied: bool) -> None:
        chosen = self.query_one(OptionList).highlighted or 0
        self.dismiss(LinkChoice(self._links[chosen].address, is_copied))

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(LinkChoice(self._links[event.option_index].address, is_copied=False))


def _option(link: Link) -> Option:
    """The address in full: the text of a link may look like another one."""
    if link.text == link.address:
        return Option(Content(link.address))
    return Option(Content.assemble(link.text, "  ", (link.address, "dim")))
