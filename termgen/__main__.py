"""`python -m termgen` is the `termgen` command."""

from __future__ import annotations

from termgen.cli import entry

entry()
