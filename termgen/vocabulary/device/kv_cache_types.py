"""The types that a KV cache may have, and the bytes that a key or value takes in it.

A head of a token has a scale of its own in the integer types, and none in the others. A scale for
a head and block would be smaller still, but a block fills token by token, and each larger number
would have the block's earlier ones rounded again.
"""

from __future__ import annotations

from typing import NamedTuple

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8", "int4")
SCALE_BYTES = 2


def head_bytes(name: str, head_dim: int, of_auto: int) -> int:
    """Bytes of one head of a token, keys or values. of_auto: bytes of a number in the type of the
    activations."""
    if name == "int8":
        return head_dim + SCALE_BYTES
    if name == "int4":
        return head_dim // 2 + 2 * SCALE_BYTES
    return head_dim * (of_auto if name == "auto" else 1)


class LayerScales(NamedTuple):
    """The numbers that a layer's keys and values are divided by in an fp8 cache."""

    key: float
    value: float
