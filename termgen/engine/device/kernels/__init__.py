"""Triton kernels of the CUDA path: one op a file, its launcher and its torch reference together.

Nothing outside this package imports triton, and whoever uses a kernel imports its module where the
path is chosen, after `why_unusable`, so that a machine without triton loads everything else.

A launcher waits for nothing and takes its lengths from device memory. Of the counts that change
from step to step, none reaches the compiler as a value (`do_not_specialize`); one may choose among
constants by its next power of two, or by a limit that is a power of two and at most 1024. So
`runner.warm_up` can run one step of each class and have compiled everything.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

MIN_COMPUTE_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies."""
FP8_COMPUTE_CAPABILITY = (8, 9)
"""Ada: the first with 8-bit floating point."""


def why_unusable(device: torch.device, *, dtype: torch.dtype | None = None) -> str:
    """Why the kernels cannot run here, with a KV cache of `dtype`; empty when they can."""
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    what, least = "Triton kernels need", MIN_COMPUTE_CAPABILITY
    if dtype == torch.float8_e4m3fn and capability >= least:
        what, least = "Triton kernels with an fp8 KV cache need", FP8_COMPUTE_CAPABILITY
    if capability < least:
        return (
            f"{what} compute capability {least[0]}.{least[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    return ""
