"""Where the heads of a gated delta net, its convolution's channels and its state lie in memory.

Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

CONV_TAPS = 4
"""Inputs of the convolution: a token's own and those of the three tokens before it."""
CHUNK = 64
"""Tokens of a prompt that are computed together, as products of matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaShape:
    """Heads of one layer. Channels are [q of all key heads | k of all key heads | v of all heads].

    A key head serves `group` value heads: those next to each other, or with `is_tiled` (the order
    of GGUF files) those that are equal modulo the number of key heads.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    is_tiled: bool = False

    def __post_init__(self) -> None:
        assert self.num_v_heads % self.num_k_heads == 0, self

    @property
    def group(self) -> int:
        return self.num_v_heads // self.num_k_heads

    @property
    def num_channels(self) -> int:
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def k_heads(self) -> list[int]:
        """The key head of each value head."""
        heads = range(self.num_v_heads)
        return [h % self.num_k_heads if self.is_tiled else h // self.group for h in heads]
