"""Reading weights once, and asking the L2 cache for bytes before they can be used."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def prefetch_weight(
    w_ptr, first_row, first_column, n, k, row_bytes, ROWS: tl.constexpr, THREADS: tl.constexpr
):
    """Asks the L2 cache for `row_bytes` of each of ROWS rows, spread over the warps."""
    ITEM_BYTES: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    SHARE: tl.constexpr = THREADS // ROWS
    thread = tl.arange(0, THREADS)
    row = tl.minimum(first_row + thread // SHARE, n - 1).to(tl.int64)
    # What is asked for never leaves its row, wherever the run of the last program starts.
    first_byte = tl.minimum(first_column * ITEM_BYTES, k * ITEM_BYTES - row_bytes)
    address = w_ptr.to(tl.int64) + row * (k * ITEM_BYTES) + first_byte
    ask_l2(address, tl.where(thread % SHARE == 0, row_bytes, 0))


@triton.jit
def weight_tile(at, columns, k, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(columns < k)[None, :], other=0, eviction_policy="evict_first")
