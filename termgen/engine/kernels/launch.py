"""Facts about the device and shapes that launchers share."""

from __future__ import annotations

from importlib.util import find_spec

import torch

_INTERPRETED_SMS = 4
"""Multiprocessors a CPU stands in for when kernels are interpreted: enough to split work."""


def has_kernels(device: torch.device) -> bool:
    """Whether the fused kernels of this package run there; else torch does their work."""
    return device.type == "cuda" and find_spec("triton") is not None


def next_power_of_2(value: int) -> int:
    """The smallest power of two not below `value`; 1 for anything smaller."""
    return 1 << max(0, value - 1).bit_length()


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def dot_precision(dtype: torch.dtype) -> str:
    """float32 is multiplied as float32; the option means nothing to the half types."""
    return "ieee" if dtype == torch.float32 else "tf32"
