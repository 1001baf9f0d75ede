"""The measured rate at which a CPU reads its memory, kept from one start to the next.

A step of one request takes as long as reading the weights does, so this rate says how fast a model
can answer before it is loaded.
"""

from __future__ import annotations

import platform
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from termgen.library.user_cache import UserCache, digest

READ_BYTES = 256 << 20
"""More than the caches of most processors hold."""
PASSES = 4
_RATES = UserCache("memory-rates", most_entries=64)
_DOUBLE = struct.Struct("<d")


def device_key(device_name: str, threads: int) -> str:
    """The entry of a device of this machine, with so many threads."""
    return digest("memory rate", platform.node(), device_name, threads)


def kept_rate(key: str) -> float | None:
    """Bytes a second as they were measured; None if they were not."""
    content = _RATES.read(key)
    if content is None or len(content) != _DOUBLE.size:
        return None
    rate: float = _DOUBLE.unpack(content)[0]
    return rate if 1e6 < rate < 1e15 else None


def keep_rate(key: str, rate: float) -> None:
    _RATES.write(key, _DOUBLE.pack(rate))


def measure_cpu_rate(threads: int, *, total_bytes: int = READ_BYTES) -> float:
    """Bytes a second that so many threads read together: the best of a few passes, in 0.2 s."""
    share = max(total_bytes // threads // 8, 1)
    parts = [np.ones(share, dtype=np.int64) for _ in range(threads)]  # written, so it is there
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            began = time.perf_counter()
            list(pool.map(np.max, parts))  # releases the GIL
            best = min(best, time.perf_counter() - began)
    return share * 8 * threads / best
