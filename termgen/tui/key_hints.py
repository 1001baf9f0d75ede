"""Keys that running text names, as in `esc closes`: those that the actions have now."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from textual.app import App
from textual.dom import DOMNode

KeyOf = Callable[[str], str]
"""An action's first key, by the name of its binding."""


class KeyedApp(App[None]):
    """Knows which keys its actions have."""

    first_keys: Mapping[str, str]
    """By the name of the binding, as people read them."""


def key_of(node: DOMNode, name: str) -> str:
    app = node.app
    assert isinstance(app, KeyedApp)
    return app.first_keys[name]


def brief_key_of(node: DOMNode, name: str) -> str:
    """For the edge of a box: `^r` and `⏎`, as in the footer."""
    key = key_of(node, name)
    if key == "enter":
        return "⏎"
    return "^" + key[5:] if key.startswith("ctrl+") and len(key) == 6 else key
