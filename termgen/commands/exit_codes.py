"""Exit codes of the `termgen` command, as shells know them."""

from __future__ import annotations

OK = 0
REGRESSION = 1
"""`termgen bench compare --fail-on-regression` found one."""
USAGE_ERROR = 2
INTERRUPTED = 130
"""Ctrl-C."""
BROKEN_PIPE = 141
"""Whoever read our output is gone."""
TERMINATED = 143
"""SIGTERM."""
