"""Bandwidth of decode attention and rate of prefill attention, by kernel configuration.

    python benchmarks/gpu_attention.py [--part decode|prefill]

Each call of a timed chain reads a cache of its own, more than the L2 holds in all, inside one CUDA
graph, with the engine's own configuration. Wrong results are reported instead of times.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch

from termgen.engine.device.attention.reference import paged_attention
from termgen.engine.device.kernels.attention import (
    decode_plan,
    paged_decode,
    paged_prefill,
    prefill_plan,
)
from termgen.engine.device.kernels.attention.decode_plan import DecodeConfig, DecodeWorkspace
from termgen.engine.device.kernels.attention.prefill_plan import PrefillConfig
from termgen.engine.device.kernels.gemm.timing import time_chain

HEADS = {"qwen3-0.6b": (16, 8, 128), "llama-3.2-1b": (32, 8, 64), "llama-3.1-8b": (32, 8, 128)}
DECODE = [[600], [600] * 8, [600] * 32, [850] * 128, [600] * 256, [8192] * 8, [32768] + [512] * 31]
PREFILL = [([2048] * 8, 2048), ([512] * 8, 512), ([8192], 8192), ([32768], 32768), ([32768], 2048)]
"""Contexts, and the new tokens at the end of each."""
DTYPE = torch.bfloat16
BLOCK = 64  # tokens of a KV block
CHAIN_BYTES = 200 * 2**20


def prefill_config(heads: tuple[int, int, int]) -> PrefillConfig:
    """The engine's own."""
    kinds: dict[str, Any] = {
        "head_dim": heads[2],
        "dtype": DTYPE,
        "kv_cache_dtype": DTYPE,
        "block_size": BLOCK,
    }
    return prefill_plan.default_config(
        heads[2],
        DTYPE,
        group=heads[0] // heads[1],
        max_query_len=4096,
        block_size=BLOCK,
        can_specialise=prefill_plan.can_specialise(torch.device("cuda"), **kinds),
    )


class Batch:
    """Rows of random contexts; queries are the last `new` tokens of each."""

    def __init__(self, lengths: list[int], new: list[int], heads: tuple[int, int, int]) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.lengths, self.new = lengths, new
        blocks = [-(-n // BLOCK) for n in lengths]
        order = (torch.randperm(sum(blocks)) + 1).to(torch.int32)
        table = torch.zeros((len(lengths), max(blocks)), dtype=torch.int32)
        for row, part in enumerate(order.split(blocks)):
            table[row, : len(part)] = part
        self.table = table.cuda()
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        self.starts = starts.cuda()
        self.q = torch.randn(sum(new), *heads[::2], device="cuda").to(DTYPE)
        memory = (1 + sum(blocks), heads[1], 2, BLOCK, heads[2])
        self.kv_bytes = 2 * sum(lengths) * heads[1] * heads[2] * DTYPE.itemsize
        copies = max(2, min(64, CHAIN_BYTES // self.kv_bytes + 1))
        self.caches = [
            torch.randn(memory, device="cuda").to(DTYPE).permute(0, 3, 2, 1, 4)
            for _ in range(copies)
        ]
        self.scale = heads[2] ** -0.5


def is_near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (actual.double() - expected).norm() / expected.norm()
    return bool(error < 1e-2)


def time_decode(batch: Batch, config: DecodeConfig) -> float | None:
    workspace = DecodeWorkspace(
        num_heads=batch.num_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        max_rows=256,
        config=config,
        device=torch.device("cuda:0"),
    )
    plan, out = workspace.new_plan(), torch.empty_like(batch.q)
    rows = len(batch.lengths)

    def call(cache: torch.Tensor) -> None:
        paged_decode.paged_decode(
            batch.q, cache, batch.table, batch.seq_lens, plan, workspace,
            num_rows=rows, scale=batch.scale, out=out,
        )  # fmt: skip

    decode_plan.plan_decode(
        batch.seq_lens, workspace, plan, num_rows=rows, num_kv_heads=batch.num_kv_heads
    )
    out.fill_(float("nan"))  # includes a launch that waits for the plan
    call(batch.caches[0])
    expected = paged_attention(
        batch.q, batch.caches[0], batch.table, batch.seq_lens, torch.arange(rows + 1),
        scale=batch.scale,
    )  # fmt: skip
    if not is_near(out, expected):
        return None
    return 1e6 * time_chain(call, batch.caches, torch.cuda.Stream(), least_calls=1)


def time_prefill(batch: Batch, config: PrefillConfig) -> float | None:
    group, rows, tokens = batch.num_heads // batch.num_kv_heads, len(batch.lengths), len(batch.q)
    num_tiles = prefill_plan.max_tiles(tokens, rows, config=config, group=group)
    fields = prefill_plan.PLAN_FIELDS.value
    plan = torch.zeros((num_tiles, fields), dtype=torch.int32, device="cuda")
    out = torch.empty_like(batch.q)
    prefill_plan.plan_prefill(
        batch.starts, batch.seq_lens, plan, config=config, group=group, first_row=0,
        num_rows=rows, num_tiles=num_tiles,
    )  # fmt: skip

    def call(cache: torch.Tensor) -> None:
        paged_prefill.paged_prefill(
            batch.q, cache, batch.table, plan, config=config,
            num_tiles=num_tiles, scale=batch.scale, out=out,
        )  # fmt: skip

    call(batch.caches[0])
    computed = batch.lengths[0] - batch.new[0]
    assert batch.new[0] >= 512
    expected = paged_attention(
        batch.q[:512], batch.caches[0], batch.table[:1],
        torch.full_like(batch.seq_lens[:1], computed + 512),
        torch.tensor([0, 512]), scale=batch.scale,
    )  # fmt: skip
    if not is_near(out[:512], expected):
        return None
    return 1e6 * time_chain(call, batch.caches[:2], torch.cuda.Stream(), least_calls=1)


def report(name: str, config: object, us: float | None, amount: float, unit: str) -> None:
    words = str(config).partition("(")[2].rstrip(")")
    result = "WRONG" if us is None else f"{us:9.1f} us {amount / us:8.2f} {unit}"
    print(f"{name:<34} {result}  {words}", flush=True)


def shape_name(model: str, lengths: list[int]) -> str:
    kinds = [f"{len(list(g))}x{n}" for n, g in itertools.groupby(lengths)]
    return f"{model} {'+'.join(kinds)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", choices=("decode", "prefill"))
    parser.add_argument("--models", nargs="+", choices=HEADS, default=list(HEADS))
    args = parser.parse_args()
    torch.manual_seed(0)
    for model in args.models:
        heads = HEADS[model]
        for lengths in DECODE if args.part != "prefill" else []:
            batch = Batch(lengths, [1] * len(lengths), heads)
            us = time_decode(batch, config := decode_plan.default_config(heads[2], DTYPE, DTYPE))
            report(shape_name(model, lengths), config, us, batch.kv_bytes / 1e6, "TB/s")
            del batch
        for lengths, new in PREFILL if args.part != "decode" else []:
            batch = Batch(lengths, [new] * len(lengths), heads)
            pairs = sum(new * (n - new) + new * new / 2 for n in lengths)
            flops = 4 * pairs * heads[0] * heads[2]
            own = prefill_config(heads)
            name = shape_name(model, lengths) + (f" last {new}" if new < lengths[0] else "")
            report(name, own, time_prefill(batch, own), flops / 1e6, "TFLOP/s")
            del batch


if __name__ == "__main__":
    main()
