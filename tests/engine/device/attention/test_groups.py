"""Layers that share one pool of blocks: where each one's keys and values lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_case import AttentionCase

from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.attention.triton_paged import TritonPagedAttention
from termgen.engine.device.config.cache_spec import CacheSpec, LayerGroup

WIDE, NARROW = CacheSpec(2, 64, None), CacheSpec(2, 32, 40)
SPECS = [NARROW, NARROW, WIDE, None, NARROW, NARROW, NARROW, WIDE, NARROW]
BLOCK_SIZE = 4


def grouped(backend: type) -> GroupedAttention:
    shape = AttentionCase([(0, 1)], head_dim=64, block_size=BLOCK_SIZE).shape
    shapes = [replace(shape, head_dim=spec.head_dim) for spec in (WIDE, NARROW)]
    groups = [
        LayerGroup(WIDE, (2, 7)),
        LayerGroup(NARROW, (0, 1, 4, 5), parts=2),
        LayerGroup(NARROW, (6, 8), parts=2),
    ]
    return GroupedAttention.of_shapes([backend(shape) for shape in shapes], shapes, groups)


@pytest.mark.parametrize("backend", [TorchReferenceAttention, TritonPagedAttention])
def test_a_number_of_one_layer_is_in_no_other_of_its_group(backend: type) -> None:
    attention = grouped(backend)
    made: list[torch.Tensor] = []

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        made.append(torch.zeros(shape))
        return made[-1]

    caches = attention.empty_caches(make, num_blocks=5, block_size=BLOCK_SIZE, dtype=torch.float32)
    num_bytes = sum(tensor[0].nbytes for tensor in made)
    assert attention.bytes_per_block(BLOCK_SIZE, torch.float32) == num_bytes
    assert len(made) == attention.num_tensors == 2
    for group in attention.groups:
        for block in range(5):
            written = 0
            for layer in group.layers:
                cache = caches[attention.cache_of(layer)]
                assert cache.shape == (5, BLOCK_SIZE, 2, 2, group.spec.head_dim)
                assert not cache[block].any(), "another layer's"
                cache[block] = layer + 1
                written += cache[block].numel()
            # And no other block: each holds what lies in its own row of the pages.
            assert sum(int(page.count_nonzero()) for page in made) == written
            assert sum(int(page[block].count_nonzero()) for page in made) == written
            for layer in group.layers:
                assert bool((caches[attention.cache_of(layer)][block] == layer + 1).all())
            for page in made:
                page.zero_()


def test_groups_share_the_plans_of_their_heads_or_have_their_own() -> None:
    own = grouped(TorchReferenceAttention)
    shared = grouped(TritonPagedAttention)
    of_layers = [i for i, spec in enumerate(SPECS) if spec is not None]
    assert len({id(own.backend_of(layer)) for layer in of_layers}) == len(own.groups) == 3
    assert len({id(shared.backend_of(layer)) for layer in of_layers}) == 2
    with pytest.raises(KeyError):
        own.group_of(3)


def test_a_pass_over_some_layers_prepares_no_other_backend() -> None:
    attention = grouped(TorchReferenceAttention)
    case = AttentionCase([(0, 1)], head_dim=64, block_size=BLOCK_SIZE)
    metadata = tuple(replace(case.metadata) for _ in attention.groups)
    some = attention.only([6])
    some.prepare(metadata)
    prepared = [attention.backend_of(layer)._prepared for layer in (2, 0, 6)]  # type: ignore[attr-defined]
    assert prepared == [None, None, metadata[2]]
    attention.backend_of(6).max_queries = 4
    assert (some.max_queries, attention.max_queries) == (4, 1)
    assert some.groups is attention.groups
