"""Alt keys of terminals without the kitty protocol, which send escape and then the key.

xterm, tmux and most Linux terminals do. Textual's parser waits for what may follow, leaves the
letter with the key, so that every field types it, and takes two such keys in a row for `^` and the
letter.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Mapping
from typing import NamedTuple

from textual import events

_KEYS = {key: f"alt+{key}" for key in (*string.ascii_lowercase, *string.digits)}
_KEYS["\r"] = "alt+enter"
del _KEYS["b"], _KEYS["f"]  # which many terminals send for alt or ctrl with an arrow


class _Sent(NamedTuple):
    """Stands for a member of Textual's enumeration of keys, which lacks most of these."""

    value: str


def let_alt_keys_through(sequences: Mapping[str, object]) -> None:
    """Add alt with a letter, a digit or enter to Textual's table of key sequences. On a Mac the
    digits stay what they are there: escape and 1 is what Option and 1 type, `¡`."""
    assert isinstance(sequences, dict)
    for key, name in _KEYS.items():
        if sys.platform != "darwin" or key not in string.digits:
            sequences["\x1b" + key] = (_Sent(name),)


def drop_letter(event: events.Event) -> None:
    """Take the character off an alt key: it is a command, not text, as with the kitty protocol."""
    if isinstance(event, events.Key) and event.key.startswith("alt+"):
        event.character = None
