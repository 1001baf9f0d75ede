"""A context for tests: the host may not wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """An operation that waits raises RuntimeError. Waiting for an event does not."""
    with warnings.catch_warnings():
        # torch says once in a process that the mode does not notice all such operations.
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
