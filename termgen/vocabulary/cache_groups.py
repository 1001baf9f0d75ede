"""How much of a context layers see, and how many blocks it takes where they differ in that.

Layers that keep the same share a block table: they are a group. Both halves of the engine count
with these functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

UNLIMITED = (1 << 31) - 1
"""Tokens of a context that a cache holds however long it is."""


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """A window that does not slide: a context is cut into chunks of so many tokens, and a token
    sees those of its own chunk, up to itself."""

    size: int

    def __post_init__(self) -> None:
        assert self.size > 0, self.size


Window = int | Chunk
"""The part of a context that a token sees, where it is not all: the last so many tokens, itself
included, or its chunk."""


def first_key(position: int, window: Window | None) -> int:
    """The first token that the one at `position` sees. It never falls as positions rise."""
    if window is None:
        return 0
    if isinstance(window, Chunk):
        return position - position % window.size
    return max(0, position - window + 1)


def most_keys(window: Window) -> int:
    """The most tokens that one sees."""
    return window.size if isinstance(window, Chunk) else window


def window_name(window: Window | None) -> str:
    """The part of a context that layers keep, for screens."""
    return CacheGroup.of(window, 0).name


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group, for screens."""

    window: int | None
    """Tokens of the window that its layers keep; None: all."""
    num_layers: int
    is_chunk: bool = False
    """True if that window is a chunk."""

    @classmethod
    def of(cls, window: Window | None, num_layers: int) -> CacheGroup:
        size = None if window is None else most_keys(window)
        return cls(size, num_layers, isinstance(window, Chunk))

    @property
    def name(self) -> str:
        """Such as `full`, `window 1,024` or `chunk 8,192`."""
        if self.window is None:
            return "full"
        return f"{'chunk' if self.is_chunk else 'window'} {self.window:,}"


def blocks_of_window(window: Window, block_size: int) -> int:
    """Most blocks that a group holds to compute one token after the other: those with the tokens
    that one sees, one more where these begin inside a block, and one for the tokens of steps in
    flight, whose number the host learns late."""
    # The distance of places in a block at which what a token sees may begin.
    step = gcd(window.size, block_size) if isinstance(window, Chunk) else 1
    return -(-(most_keys(window) - step) // block_size) + 2


def blocks_of_context(num_tokens: int, block_size: int, windows: Sequence[Window | None]) -> int:
    """Blocks that a request of so many tokens takes at most. windows: per group, the part of a
    context that it keeps; None: all."""
    whole = -(-num_tokens // block_size)
    return sum(
        whole if window is None else min(whole, blocks_of_window(window, block_size))
        for window in windows
    )


def tokens_held(num_blocks: int, block_size: int, windows: Sequence[Window | None]) -> int:
    """Tokens that so many blocks hold: of one long context, or of short ones where windows let a
    context be of any length."""
    longest = longest_context(num_blocks, block_size, windows)
    return longest if longest < UNLIMITED else num_blocks // len(windows) * block_size


def longest_context(num_blocks: int, block_size: int, windows: Sequence[Window | None]) -> int:
    """The most tokens of one request for which so many blocks are enough."""
    limited = [blocks_of_window(window, block_size) for window in windows if window is not None]
    if len(limited) == len(windows) and sum(limited) <= num_blocks:
        return UNLIMITED

    def needed(whole: int) -> int:
        return blocks_of_context(whole * block_size, block_size, windows)

    return (bisect_right(range(num_blocks + 1), num_blocks, key=needed) - 1) * block_size
