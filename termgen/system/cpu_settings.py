"""Settings of the C libraries that compute on a CPU, for before torch is loaded and reads them.

Each leaves alone what the user has set.
"""

from __future__ import annotations

import ctypes
import os
import sys

SPIN_COUNT = "10000"
"""Spins of an idle thread, tens of microseconds: about the gap between two operations of a step."""

NUM_KERNELS = "128"
"""Compiled GEMMs that oneDNN caches, of up to 0.7 MB each. A model needs about five for each row
count of its steps; compiling one takes half a millisecond."""

MAPPED_BYTES = 8 << 20
"""Allocations from this size on are returned to the system when freed."""
KEPT_BYTES = 64 << 20
"""Free memory kept at the end of a heap for reuse."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


def prepare_cpu() -> None:
    """Apply all of them."""
    calm_openmp()
    bound_kernel_caches()
    keep_heaps_compact()


def calm_openmp() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user chose otherwise.

    The OpenMP runtime reads the setting when torch is loaded, so call this before. Compute threads
    that spin for each other lose whole time slices when another thread needs a core, as the screen
    of this process does: measured ten times slower (docs/performance.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def bound_kernel_caches() -> None:
    """Limit the kernel caches of oneDNN and of torch's layer above it, unless the user did.

    Both read their setting at the first matrix product. Each keeps 1024 kernels by default, and
    row counts keep changing: memory would grow for hours, by some 700 MB.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, NUM_KERNELS)


def keep_heaps_compact() -> None:
    """Keep tensors of a step out of glibc's heaps, unless the user set these limits.

    By default glibc adapts to serve up to 32 MiB from a heap, which cannot shrink while a small
    block lies behind a large freed one: heaps grow with every new pattern of sizes.
    """
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not (set_by_user or "GLIBC_TUNABLES" in os.environ):
        mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
