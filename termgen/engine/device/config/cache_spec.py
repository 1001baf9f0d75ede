"""What each layer keeps of every token, and the groups of layers that share a block table.

All blocks of the pool have one size in bytes, cut into pages of the largest layer's size. A layer
of that size has a page of its group's blocks to itself; smaller ones share a page, as many as fit.
A group is layers of one kind that fill the pages of a block, so a kind of which a model has more
layers has several groups, and the pool gives its blocks to whichever group needs them. vLLM's
hybrid KV cache manager does the same with blocks of more tokens for smaller layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from termgen.vocabulary.cache_groups import Window, blocks_of_context, most_keys

TYPICAL_CONTEXT = 16384
"""Tokens of the context for which groups are sized, where the model's own is not shorter."""
COST_OF_A_GROUP = 0.01
"""Share of a cache for which one more group, with its block table, is not worth having."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Keys and values of one layer."""

    num_kv_heads: int
    head_dim: int
    window: Window | None
    """The part of a context that a token sees; None: all."""

    @property
    def numbers(self) -> int:
        """Numbers of one token."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_kv_heads, self.head_dim

    def within(self, max_model_len: int) -> CacheSpec:
        """The same for contexts of at most so many tokens, where a larger window hides nothing."""
        sees_all = self.window is None or most_keys(self.window) >= max_model_len
        return CacheSpec(self.num_kv_heads, self.head_dim, None if sees_all else self.window)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind that share a block table. The first `parts` of them have the first page
    of its blocks, and so on."""

    spec: CacheSpec
    layers: tuple[int, ...]
    parts: int = 1
    """Layers to a page."""

    @property
    def num_pages(self) -> int:
        return -(-len(self.layers) // self.parts)


def group_layers(
    specs: Sequence[CacheSpec | None],
    *,
    block_size: int,
    max_model_len: int,
    head_size: Callable[[int], int] = lambda head_dim: head_dim,
) -> tuple[LayerGroup, ...]:
    """The groups of a model's layers: those that keep all tokens first. specs: of each layer, None
    for one without keys and values. head_size: what a head takes of a page, in its numbers."""
    kinds: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec is not None:
            kinds.setdefault(spec.within(max_model_len), []).append(layer)
    sizes = {kind: kind.num_kv_heads * head_size(kind.head_dim) for kind in kinds}
    parts = {kind: max(sizes.values()) // size for kind, size in sizes.items()}
    context = min(max_model_len, TYPICAL_CONTEXT)

    def cost(pages: int) -> float:
        """Blocks of a context times their pages, with a price for each group."""
        windows = [
            kind.window
            for kind, layers in kinds.items()
            for _ in range(-(-len(layers) // (pages * parts[kind])))
        ]
        needed = pages * blocks_of_context(context, block_size, windows)
        return needed * (1 + COST_OF_A_GROUP * len(windows))

    most = max(-(-len(layers) // parts[kind]) for kind, layers in kinds.items())
    pages = min(range(1, most + 1), key=cost)
    ordered = sorted(kinds, key=lambda kind: kind.window is not None)
    return tuple(
        LayerGroup(kind, tuple(kinds[kind][at : at + pages * parts[kind]]), parts[kind])
        for kind in ordered
        for at in range(0, len(kinds[kind]), pages * parts[kind])
    )
