"""What the memory of a device looks like at a moment: the only place that asks for it."""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

import torch


class MemoryMeter(Protocol):
    """One device, seen from this process."""

    name: str
    """For people: `GPU memory`."""
    counts_tensors: bool
    """Whether `allocated` and `reserved` mean anything. Where they do not, tensors take memory as
    they are written to, and their sizes are added up instead."""
    segment_bytes: int
    """A large tensor takes a multiple of this."""

    def free_and_total(self) -> tuple[int, int]:
        """Bytes nobody uses, and bytes there are."""
        ...

    def allocated(self) -> int:
        """Bytes of live tensors."""
        ...

    def reserved(self) -> int:
        """Bytes taken from the device: live tensors, and what is kept for later ones."""
        ...

    def release(self) -> None:
        """Give back what is kept for later."""
        ...


class CudaMeter:
    """A GPU, and torch's allocator on it."""

    name = "GPU memory"
    counts_tensors = True
    segment_bytes = 2 * 2**20

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class HostMeter:
    """The machine's own memory."""

    name = "memory"
    counts_tensors = False
    segment_bytes = 0

    def free_and_total(self) -> tuple[int, int]:
        try:
            with open("/proc/meminfo") as meminfo:
                sizes = {
                    name: value for name, _, value in (line.partition(":") for line in meminfo)
                }
            free, total = sizes["MemAvailable"], sizes["MemTotal"]
        except (OSError, KeyError):  # not Linux: half of it is a guess that does no harm
            total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return total_bytes // 2, total_bytes
        return int(free.split()[0]) * 1024, int(total.split()[0]) * 1024

    def allocated(self) -> int:
        return 0

    def reserved(self) -> int:
        return 0

    def release(self) -> None:
        """The C library keeps freed pages of up to 32 MiB for itself until it is told."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        if trim is not None:  # glibc's
            trim(0)


def make_meter(device: torch.device) -> MemoryMeter:
    return CudaMeter(device) if device.type == "cuda" else HostMeter()
