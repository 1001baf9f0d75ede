"""Compiles the gated delta kernels for generations of GPUs that need not be here, and prints for
each its shared memory and some words of its code. A program, for the tests' process interprets
Triton."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from termgen.engine.device.kernels.compilation import collect_missing
from termgen.engine.device.kernels.recurrent import (
    chunk_factors,
    delta_decode,
    delta_prefill,
    delta_replay,
    gated_norm,
)
from termgen.engine.device.kernels.recurrent.layout import CONV_TAPS, GatedDeltaShape
from termgen.engine.device.recurrent.base import (
    GatedDeltaWeights,
    RecurrentMetadata,
    empty_state,
    tap_major,
)
from termgen.engine.device.recurrent.triton_delta import TritonGatedDelta

SHAPE = GatedDeltaShape(num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128)
ROWS, TOKENS = 8, 64
SHARED_KIB = {80: 163, 90: 227}
"""Shared memory of one program."""
DTYPES = {80: ("f16", torch.float16), 90: ("bf16", torch.bfloat16)}
WORDS = ("griddepcontrol", "wgmma")

target = GPUTarget("cuda", 80, 32)


def run_all(dtype: torch.dtype) -> None:
    """Every launcher, with both sizes of decode programs, without drafts and with 3 a row."""

    def make(size: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind)

    heads = SHAPE.num_v_heads
    conv = tap_major(torch.empty(SHAPE.num_channels, CONV_TAPS, dtype=dtype))
    weights = GatedDeltaWeights(conv, torch.empty(heads), torch.empty(heads))
    mixed = torch.empty(TOKENS, SHAPE.num_channels, dtype=dtype)
    gates = torch.empty(TOKENS, heads, dtype=dtype)
    net = TritonGatedDelta(SHAPE, max_rows=ROWS, max_tokens=TOKENS, device=mixed.device)
    whole = torch.zeros(ROWS + 1, dtype=torch.int32)
    for num_rows, num_drafts in ((1, 0), (ROWS, 0), (1, 3), (ROWS, 3)):
        counts = whole[:num_rows] if num_drafts else None
        state = empty_state(make, SHAPE, num_slots=ROWS + 1, dtype=dtype, num_drafts=num_drafts)
        metadata = RecurrentMetadata(
            query_start_loc=whole[: num_rows + 1],
            slots=whole[:num_rows],
            positions=whole[:num_rows],
            has_state=torch.zeros(num_rows, dtype=torch.bool),
            num_rows=num_rows,
            num_tokens=TOKENS,
            num_decodes=None,
            max_query_len=TOKENS,
            num_pending=counts,
            num_drafts=counts,
        )
        net.prepare(metadata)
        out = net.gated_delta(mixed, gates, gates, weights, state, metadata)
    net.gated_norm(out, out.flatten(1), torch.empty(SHAPE.v_dim), 1e-6)


def main() -> None:
    global target
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: target.arch,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    for arch, (name, dtype) in DTYPES.items():
        if arch >= 90:  # what `pdl_options` gives on such a device
            for module in (
                *(chunk_factors, delta_decode, delta_prefill, delta_replay, gated_norm),
            ):
                module.pdl_options = lambda *_, **__: {"USE_PDL": True, "launch_pdl": True}
        target = GPUTarget("cuda", arch, 32)
        delta_prefill.shared_bytes = lambda _, kib=SHARED_KIB[arch]: kib * 1024
        with collect_missing() as missing:
            run_all(dtype)
        for (kernel_name, _), (kernel, data) in missing.items():
            compiled = kernel.preload(data)
            line = {
                "arch": arch,
                "dtype": name,
                "name": kernel_name.rpartition(".")[2],
                "is_chained": "_plan_kernel" not in kernel_name,
                "shared": compiled.metadata.shared,
                "has": SHARED_KIB[arch] * 1024,
                "words": [word for word in WORDS if word in compiled.asm["ptx"]],
            }
            print(json.dumps(line))


if __name__ == "__main__":
    sys.exit(main())
