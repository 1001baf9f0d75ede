"""Alt with a digit as a key on terminals that send it as escape and digit.

Textual takes these sequences for what Option and a digit type on a Mac, `¡` for 1. Elsewhere they
are alt and the digit, as xterm, tmux and most Linux terminals send them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping


def let_alt_digits_through(sequences: Mapping[str, object]) -> None:
    """Take the nine out of Textual's table of key sequences, unless this is a Mac."""
    assert isinstance(sequences, dict)
    if sys.platform != "darwin":
        for digit in "123456789":
            sequences.pop("\x1b" + digit, None)
