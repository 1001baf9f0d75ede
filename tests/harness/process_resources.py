"""What this process holds of the system: for tests that nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any


def resources() -> set[str]:
    """Its sockets, pipes and children: `resources() <= before` says that none is left."""
    gc.collect()
    held: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            held.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    held = {one for one in held if "socket" in one or "pipe" in one}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            held |= {f"child {pid}" for pid in (task / "children").read_text().split()}
    return held


def no_process(*args: Any, **options: Any) -> Any:
    """In place of `subprocess.Popen`: the system has none left."""
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def no_thread(thread: threading.Thread) -> None:
    """In place of `threading.Thread.start`."""
    raise RuntimeError("can't start new thread")
