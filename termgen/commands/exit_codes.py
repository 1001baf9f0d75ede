"""Exit codes of the `termgen` command, by the shell's conventions."""

from __future__ import annotations

OK = 0
REGRESSION = 1
"""`termgen bench compare --fail-on-regression` found one."""
USAGE_ERROR = 2
INTERRUPTED = 130
"""Ctrl-C."""
BROKEN_PIPE = 141
"""The reader of standard output has closed it."""
TERMINATED = 143
"""SIGTERM."""
