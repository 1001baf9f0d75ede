"""The type in which queries meet the keys of a cache: used by the attention kernels.

Eight bits turn into float16 in one instruction for two values, and into bfloat16 only through
float16, by an instruction so slow that decode would wait for it rather than for memory. Every
e4m3 value is exact in float16, and so is a bfloat16 query, but for values beyond its range (where
softmax knows one key only) or too small to matter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_product_type(q, CACHE_BITS: tl.constexpr):
    """q in the type for both of attention's products; keys and values follow it."""
    if CACHE_BITS == 8 and q.dtype == tl.bfloat16:
        return tl.clamp(q.to(tl.float32), -65504.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)
    else:
        return q
