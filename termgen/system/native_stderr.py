"""Standard error without the traces that native libraries print before they raise.

Rust's runtime writes a panic's trace straight to the file descriptor. The exception that follows
says the same to the caller, who reports it.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2
_TRACE = re.compile(
    rb"\n?thread '[^\n]*panicked at [^\n]*\n[^\n]*\n"
    rb"(?:stack backtrace:\n(?:[ \t]+[^\n]*\n)*)?(?:note: [^\n]*\n)*"
)
_lock = threading.Lock()


@contextmanager
def without_panic_traces() -> Iterator[None]:
    """Hold back what this process writes to standard error, and write it at the end, without traces
    of panics. Lines of other threads are late, not lost. Screens draw through a descriptor of
    their own, see `PatientDriver`."""
    try:
        real = os.dup(STDERR)
    except OSError:  # closed: nothing is written there
        yield
        return
    with _lock, tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(real, STDERR)
            held.seek(0)
            rest = _TRACE.sub(b"", held.read())
            while rest:
                rest = rest[os.write(real, rest) :]
            os.close(real)
