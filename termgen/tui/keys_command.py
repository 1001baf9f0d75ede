"""`termgen keys`: every action by the name that the setting `keys` takes, with its keys."""

from __future__ import annotations

from textual.binding import Binding

from termgen.config import UIConfig
from termgen.tui import actions
from termgen.tui.app import TermgenApp
from termgen.tui.keymap import key_names


def list_keys(ui: UIConfig) -> None:
    """With the changes of the config file, if they are good ones."""
    keymap = TermgenApp.read_keys(ui)
    rows: dict[str, tuple[str, str]] = {}
    for scope in actions.scopes(TermgenApp.BINDINGS):
        for binding in keymap.applied(scope.bindings):
            assert isinstance(binding, Binding) and binding.id
            sign = "*" if binding.id in keymap.changes else " "
            rows.setdefault(binding.id, (sign + key_names(binding), binding.tooltip))
    width = max(len(keys) for keys, _ in rows.values())
    for name, (keys, words) in rows.items():
        print(f"{name:26}{keys:{width}}  {words}")
    print('\nchange one in the config file: [keys], then for example chat.stop = "ctrl+g"')
