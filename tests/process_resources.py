"""What this process holds of the system: for tests that nothing is left behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def resources() -> tuple[set[str], set[str]]:
    """Its sockets and pipes, and its children."""
    gc.collect()
    descriptors = {f"{fd} {_target(fd)}" for fd in os.listdir("/proc/self/fd")}
    tasks = Path("/proc/self/task").iterdir()
    children = {pid for task in tasks for pid in (task / "children").read_text().split()}
    return {d for d in descriptors if "socket" in d or "pipe" in d}, children


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # that of the listing itself
        return ""
