"""The `termgen` command, and `python -m termgen`."""

from __future__ import annotations

import sys
from typing import NoReturn


def entry() -> NoReturn:
    """Entry point of the console script."""
    try:
        from termgen.commands import cli
    except KeyboardInterrupt:  # Ctrl-C before the command installs its handler
        sys.exit(130)
    cli.entry()


if __name__ == "__main__":
    entry()
