"""The `termgen` command, and `python -m termgen`."""

from __future__ import annotations

import sys
from typing import NoReturn


def entry() -> NoReturn:
    """What the console script calls."""
    try:
        from termgen.commands import cli
    except KeyboardInterrupt:  # Ctrl-C before there is anybody to take it
        sys.exit(130)
    cli.entry()


if __name__ == "__main__":
    entry()
