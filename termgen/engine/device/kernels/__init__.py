"""Triton kernels of the CUDA path: an operation's kernels, launcher and reference in one file.

    attention   decode and prefill over the paged cache, and the plans that divide their work
    gemm        products of a few rows, also with 8-bit weights, and the tables of measured shapes
    moe         routing to experts, and their products
    sampling    logits to token ids
    rows        everything that goes row by row: norms, rotation, activation, the ends of a step

The engine runs without them, in torch: skip this package on a first reading.

No other package imports triton. The code that chooses the path imports a kernel's module, after
`why_unusable`, so that a machine without triton loads everything else.

A launcher waits for nothing and takes its lengths from device memory. A count that changes from
step to step never reaches the compiler as a value (`do_not_specialize`); it may choose among
constants by its next power of two, or by a limit that is a power of two and at most 1024. So
`runner.warm_up` runs one step of each class and has compiled everything.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

MIN_COMPUTE_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies."""
FP8_COMPUTE_CAPABILITY = (8, 9)
"""Ada: the first with 8-bit floating point."""


def why_unusable(device: torch.device, *, dtype: torch.dtype | None = None) -> str:
    """The reason that kernels cannot run here with a KV cache or weights of `dtype`; empty when
    they can."""
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    what, least = "Triton kernels need", MIN_COMPUTE_CAPABILITY
    if dtype == torch.float8_e4m3fn and capability >= least:
        what, least = "Triton kernels with 8-bit floats need", FP8_COMPUTE_CAPABILITY
    if capability < least:
        return (
            f"{what} compute capability {least[0]}.{least[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    return ""


def has_float8(device: str) -> bool:
    """True if kernels can run here with weights in 8-bit floats. device: as torch calls it."""
    gpu = torch.device(device)
    return torch.cuda.is_available() and not why_unusable(gpu, dtype=torch.float8_e4m3fn)
