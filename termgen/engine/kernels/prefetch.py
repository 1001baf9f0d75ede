"""Asking the L2 cache for bytes before they can be used."""

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
