"""A footer that shows the keys that act now, not all bound ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Footer
from textual.widgets._footer import FooterKey, FooterLabel

from termgen.tui.keys.keymap import key_names

KeysNow = Callable[[], tuple[str, Sequence[tuple[str, str]]]]
"""A leading word, and actions: names of bindings with their current meanings."""


class KeyBar(Footer):
    def __init__(self, keys_now: KeysNow) -> None:
        super().__init__(show_command_palette=False)
        self._keys_now = keys_now

    def compose(self) -> ComposeResult:
        if not self._bindings_ready:
            return
        mode, names = self._keys_now()
        if mode:
            yield FooterLabel(f" {mode} ", classes="mode")
        bound: dict[str, list[Binding]] = {}
        for active in self.screen.active_bindings.values():
            bound.setdefault(active.binding.id or "", []).append(active.binding)
        for name, what in names:
            # in a mode these are letters, which are shorter than the global keys
            keys = sorted(bound.get(name, ()), key=lambda binding: bool(mode) and len(binding.key))
            if keys:
                shown = key_names(keys[0]).replace("ctrl+", "^").replace("enter", "⏎")
                tooltip = keys[0].tooltip
                yield FooterKey(
                    keys[0].key, shown, what, keys[0].action, tooltip=tooltip
                ).data_bind(compact=Footer.compact)
