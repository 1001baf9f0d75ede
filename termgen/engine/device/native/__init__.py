"""Kernels for CPUs, written in LLVM's intermediate language and compiled when a model is built.

    jit                 what all of them share: loops, vectors, threads, compilation, kept code
    int8_blocks         8-bit weights with a scale for every 32 numbers, laid out for a kernel
    int8_kernels        products with them
    experts             all experts of a layer in one call
    expert_kernels      its kernels
    row_kernels         norms, rotation, activation
    decode_attention    attention of one query a row

The engine runs without them, in torch: skip this package on a first reading.

LLVM turns vectors of 16 numbers into whatever the machine has: AVX-512, AVX2 or NEON. A kernel
divides its work among the threads of torch's own OpenMP team. A call costs about a microsecond and
does not hold the GIL.
"""

from __future__ import annotations

import platform
from importlib.util import find_spec

import torch


def why_unusable() -> str:
    """The reason that these kernels cannot run here; empty when they can."""
    if find_spec("llvmlite") is None:
        return "the package llvmlite is not installed"
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    if is_x86 and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return "the processor has no AVX2"  # nor instructions for 16-bit floats
    return ""
