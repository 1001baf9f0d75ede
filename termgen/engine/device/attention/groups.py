"""The attention of a whole model: which group each layer belongs to, and the groups' backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace

import torch

from termgen.engine.device.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    kv_cache_view,
)
from termgen.engine.device.config.cache_spec import CacheSpec, LayerGroup
from termgen.engine.device.kernels.kv_cache import head_items
from termgen.vocabulary.cache_groups import Window


class GroupedAttention:
    """One backend for all groups of the same heads where its plans do not depend on block tables,
    else one for each group."""

    def __init__(self, backends: Sequence[AttentionBackend], groups: Sequence[LayerGroup]) -> None:
        """backends: of each group; the same where groups share one."""
        self.name, self.capabilities = backends[0].name, backends[0].capabilities
        self.groups = tuple(groups)
        self._backends = tuple(backends)
        self._prepared = {id(one): (one, self._backends.index(one)) for one in self._backends}
        self._places = {
            layer: (group, place)
            for group, members in enumerate(self.groups)
            for place, layer in enumerate(members.layers)
        }

    @classmethod
    def of_shapes(
        cls,
        backends: Sequence[AttentionBackend],
        shapes: Sequence[AttentionShape],
        groups: Sequence[LayerGroup],
    ) -> GroupedAttention:
        """backends: one made for each of the shapes, of which there is one for each number and size
        of key heads among the groups."""
        made: dict[tuple[int, int], AttentionBackend] = {
            shape.kv_heads: backend for shape, backend in zip(shapes, backends, strict=True)
        }
        again = {shape.kv_heads: shape for shape in shapes}
        of_groups: list[AttentionBackend] = []
        for group in groups:
            backend = made[group.spec.heads]
            if backend in of_groups and not backend.capabilities.shares_plans:
                backend = type(backend)(again[group.spec.heads])
            of_groups.append(backend)
        return cls(of_groups, groups)

    @classmethod
    def without_windows(
        cls, backend: AttentionBackend, specs: Sequence[CacheSpec | None]
    ) -> GroupedAttention:
        """All layers of the same heads in one group, which keeps all tokens. backend: for all of
        them, so the groups have to have the same block table. specs: of each layer, None for one
        without a cache of its own."""
        kinds: dict[CacheSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            if spec is not None:
                kinds.setdefault(replace(spec, window=None), []).append(layer)
        groups = [LayerGroup(spec, tuple(layers)) for spec, layers in kinds.items()]
        return cls([backend] * len(groups), groups)

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """Per group, the part of a context that it keeps; None: all."""
        return tuple(group.spec.window for group in self.groups)

    @property
    def num_tensors(self) -> int:
        """Tensors of the cache: one for each page of a block."""
        return max(group.num_pages for group in self.groups)

    @property
    def max_queries(self) -> int:
        """Most tokens of each row in a step that says their positions; see `AttentionBackend`."""
        return min(backend.max_queries for backend, _ in self._prepared.values())

    def group_of(self, layer: int) -> int:
        """The group of a layer with a cache of its own."""
        return self._places[layer][0]

    def cache_of(self, layer: int) -> int:
        """The layer's place among `empty_caches`."""
        return sum(other < layer for other in self._places)

    def behind(self, num_layers: int) -> GroupedAttention:
        """The same, with the layers behind so many counted from zero: those of a drafter."""
        shifted = copy(self)
        shifted._places = {layer - num_layers: place for layer, place in self._places.items()}
        return shifted

    def only(self, layers: Iterable[int]) -> GroupedAttention:
        """The same for passes over some of the layers: the backends of others are not prepared."""
        some, backends = copy(self), {id(self.backend_of(layer)) for layer in layers}
        some._prepared = {key: both for key, both in self._prepared.items() if key in backends}
        return some

    def backend_of(self, layer: int) -> AttentionBackend:
        return self._backends[self.group_of(layer)]

    def prepare(self, metadata: tuple[AttentionMetadata, ...]) -> None:
        """Compute what the layers share; once per step, before the model's forward. metadata: of
        each group."""
        for backend, group in self._prepared.values():
            backend.prepare(metadata[group])

    def _page_numbers(self, block_size: int, dtype: torch.dtype) -> int:
        specs = [group.spec for group in self.groups]
        return block_size * max(2 * s.num_kv_heads * head_items(s.head_dim, dtype) for s in specs)

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of the pool."""
        return self._page_numbers(block_size, dtype) * self.num_tensors * dtype.itemsize

    def empty_caches(
        self,
        make: Callable[[tuple[int, ...]], torch.Tensor],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """The caches of the layers that have their own, in their order, from tensors that `make`
        returns, of type `dtype`. A block belongs to one group at a time, so groups share the
        tensors."""
        shape = (num_blocks, self._page_numbers(block_size, dtype))
        pages = [make(shape) for _ in range(self.num_tensors)]
        views: dict[tuple[tuple[int, int], int], torch.Tensor] = {}
        caches = []
        for _, (group, place) in sorted(self._places.items()):
            members = self.groups[group]
            heads = members.spec.heads
            if (view := views.get((heads, place))) is None:
                page, part = divmod(place, members.parts)
                view = views[heads, place] = kv_cache_view(
                    self._backends[group],
                    pages[page],
                    block_size=block_size,
                    num_kv_heads=heads[0],
                    head_dim=heads[1],
                    part=part,
                )
            caches.append(view)
        return caches


def by_group(
    metadata: AttentionMetadata,
    block_tables: torch.Tensor,  # [groups, B, max_blocks]
    slot_mappings: torch.Tensor,  # [groups, T]
) -> tuple[AttentionMetadata, ...]:
    """The metadata of each group, which differ in where keys and values lie alone."""
    first = replace(metadata, block_table=block_tables[0], slot_mapping=slot_mappings[0])
    return (
        first,
        *(
            replace(metadata, block_table=table, slot_mapping=slots)
            for table, slots in zip(block_tables[1:], slot_mappings[1:], strict=True)
        ),
    )
