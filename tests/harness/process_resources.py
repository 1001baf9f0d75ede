"""System resources of this process, for tests that none is leaked."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any


def resources() -> set[str]:
    """Sockets, pipes and children of this process: `resources() <= before` means that none
    leaked."""
    gc.collect()
    held: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            held.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    held = {one for one in held if "socket" in one or "pipe" in one}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            held |= {f"child {pid}" for pid in (task / "children").read_text().split()}
    return held


def no_process(*args: Any, **options: Any) -> Any:
    """Replaces `subprocess.Popen`: the system can start no process."""
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def no_thread(thread: threading.Thread) -> None:
    """Replaces `threading.Thread.start`: the system can start no thread."""
    raise RuntimeError("can't start new thread")
