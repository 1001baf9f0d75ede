"""Shared by launchers: facts about the device and shapes, and a prefetch into the L2 cache."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

_GLUON_RELEASES = ("3.6.", "3.7.")
"""Releases of Triton whose Gluon compiles the kernels."""
_INTERPRETED_SHARED_BYTES = 227 * 1024
_INTERPRETED_SMS = 4
"""Multiprocessors a CPU stands in for when kernels are interpreted: enough to split work."""


def next_power_of_2(value: int) -> int:
    """The smallest power of two not below `value`; 1 for anything smaller."""
    return 1 << max(0, value - 1).bit_length()


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def shared_bytes(device: torch.device) -> int:
    """The most shared memory that one program may have."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    count: int = properties.shared_memory_per_block_optin
    return count


def dot_precision(dtype: torch.dtype) -> str:
    """float32 is multiplied as float32; the option means nothing to the half types."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """True if a kernel may start while the one before it still runs (programmatic dependent
    launch), which takes an NVIDIA device of the Hopper generation or later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def has_tma(device: torch.device) -> bool:
    """True if tiles can be copied by the tensor memory accelerator; the interpreter can, too."""
    return device.type != "cuda" or has_pdl(device)


@functools.cache
def has_hopper_gluon(device: torch.device) -> bool:
    """True if kernels in Gluon for Hopper run: other generations multiply in other ways, and Gluon,
    experimental as it is, may change with each release of Triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper and triton.__version__.startswith(_GLUON_RELEASES)


def register_limit(device: torch.device, num_registers: int) -> dict[str, int]:
    """Launch arguments that keep a kernel to so many registers per thread, where that is known."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {}
    return {"maxnreg": num_registers}


def pdl_options(device: torch.device, *, enabled: bool = True) -> dict[str, bool]:
    """Launch arguments of a kernel that takes part in programmatic dependent launch.

    Its contract: before `gdc_wait` it writes nothing, and of the step's values it reads only those
    that a launch without early start lies behind, as the embedding lies behind rotations and plans:
    such a launch begins when all before it has ended, and the chain begins when it has. Every
    program waits, and lets its dependents start as early as it can, for they wait for its end in
    any case. A chain gains only where all its kernels do so.
    """
    if enabled and has_pdl(device):
        return {"USE_PDL": True, "launch_pdl": True}
    return {"USE_PDL": False}


@triton.jit
def ask_l2(address, num_bytes):
    """One request per element: address int64 and num_bytes int32, both multiples of 16; 0 asks for
    nothing. As many elements as the program has threads, so that each asks once."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred asks;
        setp.ne.u32 asks, $2, 0;
        @!asks bra asked;
        cp.async.bulk.prefetch.L2.global [$1], $2;
        asked:
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
