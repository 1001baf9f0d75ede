"""Windows as the kernels of attention have them: one number and one function.

`WINDOW` is the size of a sliding window, that of a chunk with a minus, and 0 where a query sees all
before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from termgen.vocabulary.cache_groups import Chunk, Window


def window_constant(window: Window | None) -> int:
    """The number that kernels take for a window."""
    if window is None:
        return 0
    return -window.size if isinstance(window, Chunk) else window


@triton.jit
def first_key(position, WINDOW: tl.constexpr):
    """The first key that the query at a position sees, under a window; 0 for one before 0, which is
    padding."""
    if WINDOW < 0:
        position = tl.maximum(position, 0)
        first = position - position % (-WINDOW)
    else:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit
def first_masked(
    num_full, first_position, QUERIES: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr
):
    """The first tile of keys that some of a tile's queries see in part, or not at all, under a
    window. num_full: that tile where they see all before them."""
    first_seen = first_key(first_position, WINDOW)
    masked = first_seen // TILE
    if WINDOW < 0 and WINDOW % TILE == 0:
        # Tiles of keys begin where chunks do: queries of one chunk see all of the first ones.
        is_one_chunk = first_key(first_position + QUERIES - 1, WINDOW) == first_seen
        masked = tl.where(is_one_chunk, num_full, masked)
    return masked
