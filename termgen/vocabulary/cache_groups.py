"""How many blocks a context takes, where layers differ in how much of it they keep.

Layers that keep the same share a block table: they are a group. Both halves of the engine count
with these functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

UNLIMITED = (1 << 31) - 1
"""Tokens of a context that a cache holds however long it is."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group, for screens."""

    window: int | None
    """How many of the last tokens its layers keep; None: all."""
    num_layers: int


def blocks_of_window(window: int, block_size: int) -> int:
    """Most blocks that a group holds to compute one token after the other: those with the tokens
    that one sees, one more where these begin inside a block, and one for the tokens of steps in
    flight, whose number the host learns late."""
    return -(-(window - 1) // block_size) + 2


def blocks_of_context(num_tokens: int, block_size: int, windows: Sequence[int | None]) -> int:
    """Blocks that a request of so many tokens takes at the end. windows: per group, how many of the
    last tokens it keeps; None: all."""
    whole = -(-num_tokens // block_size)
    return sum(
        whole if window is None else min(whole, blocks_of_window(window, block_size))
        for window in windows
    )


def tokens_held(num_blocks: int, block_size: int, windows: Sequence[int | None]) -> int:
    """Tokens that so many blocks hold: of one long context, or of short ones where windows let a
    context be of any length."""
    longest = longest_context(num_blocks, block_size, windows)
    return longest if longest < UNLIMITED else num_blocks // len(windows) * block_size


def longest_context(num_blocks: int, block_size: int, windows: Sequence[int | None]) -> int:
    """The most tokens of one request for which so many blocks are enough."""
    limited = [blocks_of_window(window, block_size) for window in windows if window is not None]
    if len(limited) == len(windows) and sum(limited) <= num_blocks:
        return UNLIMITED

    def needed(whole: int) -> int:
        return blocks_of_context(whole * block_size, block_size, windows)

    return (bisect_right(range(num_blocks + 1), num_blocks, key=needed) - 1) * block_size
