"""A footer that shows the keys that act now, not all bound ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Footer
from textual.widgets._footer import FooterKey, FooterLabel

from termgen.tui.keys.keymap import key_names

KeysNow = Callable[[], tuple[str, Sequence[tuple[str, str]]]]
"""A leading word, and actions: names of bindings with their current meanings."""


class ShownKey(NamedTuple):
    key: str
    key_display: str
    description: str
    action: str
    tooltip: str


class KeyBar(Footer):
    def __init__(self, keys_now: KeysNow) -> None:
        super().__init__(show_command_palette=False)
        self._keys_now = keys_now

    def compose(self) -> ComposeResult:
        if not self._bindings_ready:
            return
        mode, keys = self._read()
        if mode:
            yield FooterLabel(f" {mode} ", classes="mode")
        for key in keys:
            yield self._widget_of(key)

    async def recompose(self) -> None:
        """Change the widgets that are there: to make and style new ones takes far longer, and comes
        twice with every question."""
        if not self.is_attached or self._pruning:
            return
        mode, keys = self._read()
        widgets = list(self.query_children(FooterKey))
        if mode or not widgets or len(self.children) != len(widgets):
            await super().recompose()
            return
        async with self.batch():
            for widget, key in zip(widgets, keys, strict=False):
                _change(widget, key)
            await self.remove_children(widgets[len(keys) :])
            await self.mount_all(map(self._widget_of, keys[len(widgets) :]))

    def _read(self) -> tuple[str, list[ShownKey]]:
        """The leading word and the keys."""
        mode, names = self._keys_now()
        bound: dict[str, list[Binding]] = {}
        for active in self.screen.active_bindings.values():
            bound.setdefault(active.binding.id or "", []).append(active.binding)
        found = []
        for name, what in names:
            # in a mode these are letters, which are shorter than the global keys
            keys = sorted(bound.get(name, ()), key=lambda binding: bool(mode) and len(binding.key))
            if keys:
                shown = key_names(keys[0]).replace("ctrl+", "^").replace("enter", "⏎")
                found.append(ShownKey(keys[0].key, shown, what, keys[0].action, keys[0].tooltip))
        return mode, found

    def _widget_of(self, key: ShownKey) -> FooterKey:
        widget = FooterKey(
            key.key, key.key_display, key.description, key.action, tooltip=key.tooltip
        )
        return widget.data_bind(compact=Footer.compact)


def _change(widget: FooterKey, key: ShownKey) -> None:
    before = (widget.key, widget.key_display, widget.description, widget.action)
    if before == key[:-1] and (widget.tooltip or "") == key.tooltip:
        return
    widget.key, widget.key_display, widget.description, widget.action = key[:-1]
    widget.tooltip = key.tooltip or None
    widget.refresh(layout=True)
