"""Compiles what writes to a cache with scales for GPUs that need not be here.

A program: the tests' process runs Triton interpreted, which compiles nothing. Argument: a JSON list
of cases, each with `arch` and the sizes below. Prints a JSON list of what each case compiled to.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from termgen.engine.device.attention.base import kv_cache_view
from termgen.engine.device.attention.triton_paged import TritonPagedAttention
from termgen.engine.device.kernels.compilation import collect_missing
from termgen.engine.device.kernels.kv_cache import head_items, kv_cache_dtype
from termgen.engine.device.kernels.rows import spread_heads
from termgen.engine.device.kernels.rows.qk_rope_kv import qk_rope_kv, store_kv

BLOCK_SIZE = 64
NUM_HEADS, NUM_KV_HEADS = 8, 2

target = GPUTarget("cuda", 90, 32)


def made(
    *,
    arch: int,
    kind: str,
    head_dim: int,
    rotary_dim: int = 0,
    dtype: str = "bfloat16",
    num_tokens: int = 3,
    has_norm: bool = False,
    has_values: bool = True,
) -> list[dict[str, Any]]:
    """What a step's keys, values and queries compile to, from a projection and apart."""
    global target
    target = GPUTarget("cuda", arch, 32)
    spread_heads.pdl_options = lambda *_, **__: (  # type: ignore[attr-defined]
        {"USE_PDL": True, "launch_pdl": True} if arch >= 90 else {"USE_PDL": False}
    )
    of_model = getattr(torch, dtype)
    of_cache = kv_cache_dtype(kind, of_model)
    cache = kv_cache_view(
        TritonPagedAttention,  # type: ignore[arg-type]
        torch.empty(8, 2 * BLOCK_SIZE * NUM_KV_HEADS * head_items(head_dim, of_cache)).to(of_cache),
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
    )
    heads = NUM_HEADS + (2 if has_values else 1) * NUM_KV_HEADS
    qkv = torch.empty(num_tokens, heads * head_dim, dtype=of_model)
    cos = sin = torch.empty(num_tokens, 1, rotary_dim or head_dim)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    normed = NUM_HEADS + NUM_KV_HEADS
    weight = torch.empty(normed, head_dim, dtype=torch.float32) if has_norm else None
    parts = qkv.view(num_tokens, heads, head_dim)
    with collect_missing() as missing:
        qk_rope_kv(qkv, cache, cos, sin, slots, num_heads=NUM_HEADS, norm_weight=weight)
        k, v = parts[:, NUM_HEADS:normed], parts[:, -NUM_KV_HEADS:]
        store_kv(k, v, cache, slots, parts[:, :NUM_HEADS])
    found = []
    for kernel, data in missing.values():
        compiled = kernel.preload(data)
        ptx = compiled.asm["ptx"]
        found.append(
            {
                "kernel": compiled.metadata.name,
                "shared": compiled.metadata.shared,
                "shuffles": ptx.count("shfl.sync"),
                "spills": ".local" in ptx,
            }
        )
    return found


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: target.arch,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    print(json.dumps([made(**case) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    sys.exit(main())
