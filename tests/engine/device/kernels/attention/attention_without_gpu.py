"""Compiles attention for GPUs that need not be here, and prints the shared memory of each kernel.

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

from termgen.engine.device.attention import triton_paged
from termgen.engine.device.attention.base import (
    SINKS,
    SOFTCAP,
    AttentionForm,
    AttentionMetadata,
    AttentionShape,
    kv_cache_view,
)
from termgen.engine.device.attention.triton_paged import TritonPagedAttention
from termgen.engine.device.kernels.attention import paged_decode, paged_prefill
from termgen.engine.device.kernels.compilation import collect_missing
from termgen.engine.device.kernels.kv_cache import head_items
from termgen.vocabulary.cache_groups import Chunk, Window

BLOCK_SIZE = 64
NUM_TOKENS = 200
SHARED_KIB = {80: 163, 89: 99, 90: 227}

target = GPUTarget("cuda", 90, 32)


def made(
    *,
    arch: int,
    head_dim: int,
    group: int = 4,
    dtype: str = "bfloat16",
    cache_dtype: str = "",
    window: Window | None = None,
    chunk: int = 0,
    softcap: float | None = None,
    has_sinks: bool = False,
    query_len: int = NUM_TOKENS,
) -> list[dict[str, Any]]:
    """What one decode and one prompt compile to. chunk: size of the window, if it is a chunk."""
    window = Chunk(chunk) if chunk else window
    global target
    target = GPUTarget("cuda", arch, 32)
    triton_paged.shared_bytes = lambda device: SHARED_KIB[arch] * 1024  # type: ignore[attr-defined]
    paged_prefill.has_tma = lambda device: arch >= 90  # type: ignore[attr-defined]
    paged_decode.pdl_options = lambda *_, **__: (  # type: ignore[attr-defined]
        {"USE_PDL": True, "launch_pdl": True} if arch >= 90 else {"USE_PDL": False}
    )
    q_dtype = getattr(torch, dtype)
    kv_dtype = getattr(torch, cache_dtype or dtype)
    needs = {SOFTCAP} if softcap is not None else set()
    shape = AttentionShape(
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        windows=(window,),
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_tokens=1024,
        dtype=q_dtype,
        kv_cache_dtype=kv_dtype,
        device=torch.device("cpu"),
        needs=frozenset(needs | ({SINKS} if has_sinks else set())),
    )
    backend = TritonPagedAttention(shape)
    cache = kv_cache_view(
        backend,
        torch.empty(8, 2 * BLOCK_SIZE * 2 * head_items(head_dim, kv_dtype), dtype=kv_dtype),
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        head_dim=head_dim,
    )
    sinks = torch.zeros(2 * group) if has_sinks else None
    form = AttentionForm(head_dim**-0.5, window, softcap, sinks)
    tokens = 1 + query_len
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([9, query_len], dtype=torch.int32),
        block_table=torch.zeros(2, 8, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        num_rows=2,
        num_tokens=tokens,
        num_decodes=1,
        max_query_len=query_len,
        max_seq_len=query_len,
        block_size=BLOCK_SIZE,
    )
    with collect_missing() as missing:
        backend.prepare(metadata)
        missing.clear()  # the plans
        backend.forward(
            torch.zeros(tokens, 2 * group, head_dim, dtype=q_dtype), cache, metadata, form
        )
    found = []
    for kernel, data in missing.values():
        compiled = kernel.preload(data)
        ptx = compiled.asm["ptx"]
        found.append(
            {
                "kernel": compiled.metadata.name,
                "shared": compiled.metadata.shared,
                "wgmma": "wgmma" in ptx,
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
