"""Keys of actions: those of the bindings, unless the setting `keys` changes them.

Reads `ID=KEY KEY` entries and reports every mistake in them before a screen opens. Knows bindings,
but no screen: `actions` says which bindings meet on a screen.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from textual.app import App
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.keys import KEY_NAME_REPLACEMENTS, Keys, key_to_character

from termgen.errors import ConfigError
from termgen.system.choices import Choices

_NAMES = {
    "escape": "esc",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
    "pageup": "pgup",
    "pagedown": "pgdn",
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "equals_sign": "=",
    "plus": "+",
    "slash": "/",
    "minus": "-",
}
_ALSO = {shown: name for name, shown in _NAMES.items()} | {
    "return": "enter",
    "del": "delete",
    "ctrl+i": "tab",  # a terminal sends the same for both
    "ctrl+m": "enter",
}
_MODIFIERS = ("ctrl", "alt", "shift", "super", "hyper", "meta")
_KNOWN = {key.value.rpartition("+")[2] for key in Keys if "<" not in key.value} - {"ignore"}
_KNOWN |= set(KEY_NAME_REPLACEMENTS.values())


class Scope(NamedTuple):
    """Bindings that are active together on a screen."""

    name: str
    bindings: Sequence[BindingType]
    fixed: Sequence[BindingType] = ()
    """Bindings of Textual's own, such as those that edit text."""


@dataclass(frozen=True)
class Keymap:
    """The changes; empty for the bindings as they are written."""

    changes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def applied(self, bindings: Iterable[BindingType]) -> list[Binding]:
        """The bindings with the keys that they have now."""
        own = [binding for binding in bindings if isinstance(binding, Binding)]
        return [self._changed(binding) for binding in own]

    def _changed(self, binding: Binding) -> Binding:
        keys = self.changes.get(binding.id or "")
        return binding if keys is None else replace(binding, key=",".join(keys), key_display=None)

    def first_keys(self, bindings: Iterable[BindingType]) -> dict[str, str]:
        """The key that a hint names, as people read it, by the name of its binding."""
        return {b.id: key_names(b).split("  ")[0] for b in self.applied(bindings) if b.id}

    def for_textual(self) -> dict[str, str]:
        """The argument for `App.set_keymap`."""
        return {name: ",".join(keys) for name, keys in self.changes.items()}


def key_names(binding: Binding) -> str:
    """`shift+pageup,ctrl+up` as people read it."""
    keys = []
    for key in binding.key.split(","):
        *modifiers, name = key.split("+")
        keys.append("+".join([*modifiers, _NAMES.get(name, name)]))
    return "  ".join(keys)


def read_keymap(entries: Iterable[str], scopes: Sequence[Scope]) -> Keymap:
    """Check `ID=KEY KEY` entries. Raises ConfigError for the first that cannot be."""
    known = {
        binding.id
        for scope in scopes
        for binding in scope.bindings
        if isinstance(binding, Binding) and binding.id
    }
    changes: dict[str, tuple[str, ...]] = {}
    written: dict[str | None, str] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        name, keys = name.strip(), text.split()
        if not equals or not keys:
            raise _error(entry, "an entry is written ID=KEY, or ID=KEY KEY")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise _error(entry, f"there is no action {name!r}{hint} (`termgen keys` lists them)")
        if name in changes:
            raise _error(entry, f"{name} is there twice")
        written[name] = entry
        changes[name] = tuple(dict.fromkeys(_normal_key(key, entry) for key in keys))
    keymap = Keymap(MappingProxyType(changes))
    for scope in scopes:
        _check_scope(scope, keymap, written)
    return keymap


def _check_scope(scope: Scope, keymap: Keymap, written: Mapping[str | None, str]) -> None:
    """No key has two actions here, unless it had them before."""
    before = {b.id: b.key.split(",") for b in scope.bindings if isinstance(b, Binding)}
    fixed = {b.key: b.description for b in Binding.make_bindings(scope.fixed)}
    takers: dict[str, Binding] = {}
    for binding in keymap.applied(scope.bindings):
        for key in binding.key.split(","):
            other = takers.setdefault(key, binding)
            if other is not binding:
                changed, kept = (
                    (binding, other) if binding.id in keymap.changes else (other, binding)
                )
                if changed.id in keymap.changes:
                    reason = f"{key} is the key of {kept.id} on the {scope.name} screen"
                    raise _error(written[changed.id], reason)
            is_new = binding.id in keymap.changes and key not in before[binding.id]
            if is_new and key in fixed:
                reason = f"{key} has a use of its own on the {scope.name} screen"
                raise _error(written[binding.id], f"{reason}: {fixed[key].lower()}")


def _error(entry: str, reason: str) -> ConfigError:
    return ConfigError(f"keys: {entry!r}: {reason}", param="keys")


def _normal_key(text: str, entry: str) -> str:
    """A key by Textual's name for it: `?` is `question_mark`, `esc` is `escape`."""
    text = _ALSO.get(text, text)
    head, _, last = text.rpartition("+") if len(text) > 1 else ("", "", text)
    if head.endswith("+") and not last:  # ctrl++
        head, last = head[:-1], "+"
    modifiers = head.split("+") if head else []
    last = _ALSO.get(last, last)
    if len(last) == 1 and not last.isalnum():
        name = unicodedata.name(last, "").lower().replace("-", "_").replace(" ", "_")
        last = KEY_NAME_REPLACEMENTS.get(name, name)
    is_known = last in _KNOWN or len(last) == 1 or key_to_character(last) is not None
    if not last or not is_known or any(word not in _MODIFIERS for word in modifiers):
        raise _error(entry, f"there is no key {text!r}")
    return "+".join([*modifiers, last])


KeyOf = Callable[[str], str]
"""An action's first key, by the name of its binding."""


class KeyedApp(App[None]):
    """Knows which keys its actions have, and what earlier runs chose."""

    first_keys: Mapping[str, str]
    """First key of each binding, as people read it, by the binding's name."""
    choices: Choices

    def copy(self, text: str, what: str) -> None:
        """Copy `text` to the clipboard. A notice says what has become of `what`."""
        raise NotImplementedError  # abstract: `TermgenApp` does it, which widgets do not import

    def remember(self, name: str, value: str | int) -> None:
        """Keep a choice for later runs."""
        raise NotImplementedError  # as above

    def keep_theme(self) -> None:
        """Begin later runs with the present theme, or say how to."""
        raise NotImplementedError  # as above


def key_of(node: DOMNode, name: str) -> str:
    app = node.app
    assert isinstance(app, KeyedApp)
    return app.first_keys[name]


def brief_key_of(node: DOMNode, name: str) -> str:
    """A key for the edge of a box: `^r` and `⏎`, as in the footer."""
    key = key_of(node, name)
    if key == "enter":
        return "⏎"
    return "^" + key[5:] if key.startswith("ctrl+") and len(key) == 6 else key
