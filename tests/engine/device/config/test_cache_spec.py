"""Which layers share a block table."""

from __future__ import annotations

import pytest

from termgen.engine.device.config.cache_spec import CacheSpec, LayerGroup, group_layers
from termgen.vocabulary.cache_groups import Chunk, blocks_of_context

FULL, SHORT = CacheSpec(4, 64, None), CacheSpec(4, 64, 512)


def pattern(num_layers: int, period: int) -> list[CacheSpec]:
    """Every period-th layer keeps all tokens, as in Gemma 3."""
    return [FULL if (i + 1) % period == 0 else SHORT for i in range(num_layers)]


def groups_of(specs: list[CacheSpec], max_model_len: int = 8192) -> tuple[LayerGroup, ...]:
    return group_layers(specs, block_size=64, max_model_len=max_model_len)


def test_layers_of_one_kind_are_one_group() -> None:
    assert groups_of([FULL] * 7) == (LayerGroup(FULL, tuple(range(7))),)
    assert groups_of([SHORT] * 7) == (LayerGroup(SHORT, tuple(range(7))),)


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert groups_of(pattern(12, 6), 512) == (LayerGroup(FULL, tuple(range(12))),)
    assert len(groups_of(pattern(12, 6), 513)) > 1


def test_a_chunk_as_long_as_the_context_is_none() -> None:
    chunked = CacheSpec(4, 64, Chunk(512))
    specs = [chunked, chunked, chunked, FULL] * 3
    assert groups_of(specs, 512) == (LayerGroup(FULL, tuple(range(12))),)
    groups = groups_of(specs, 8192)
    assert {group.spec for group in groups} == {FULL, chunked} and groups[0].spec == FULL


def test_kinds_that_keep_all_tokens_come_first() -> None:
    groups = groups_of([SHORT, FULL] * 6)
    assert [group.spec for group in groups] == [FULL, SHORT]
    assert groups[0].layers == (1, 3, 5, 7, 9, 11) and groups[1].layers == (0, 2, 4, 6, 8, 10)


@pytest.mark.parametrize(("num_layers", "period"), [(26, 6), (34, 6), (62, 6), (24, 2), (48, 12)])
def test_every_layer_has_one_place_and_little_is_lost(num_layers: int, period: int) -> None:
    specs = pattern(num_layers, period)
    groups = groups_of(specs)
    assert sorted(i for group in groups for i in group.layers) == list(range(num_layers))
    for group in groups:
        assert all(specs[i] == group.spec for i in group.layers)
    size = max(len(group.layers) for group in groups)
    windows = [group.spec.window for group in groups]
    taken = size * blocks_of_context(8192, 64, windows)
    needed = sum(blocks_of_context(8192, 64, [spec.window]) for spec in specs)
    assert taken <= 1.15 * needed
    assert len(groups) <= 16, "a block table each"


WIDE, NARROW = CacheSpec(2, 128, None), CacheSpec(2, 64, 512)


def test_small_layers_share_the_pages_of_large_ones() -> None:
    groups = groups_of([NARROW, NARROW, NARROW, NARROW, WIDE] * 3)
    assert groups[0] == LayerGroup(WIDE, (4, 9, 14))
    assert [len(group.layers) for group in groups[1:]] == [6, 6]
    assert all((group.parts, group.num_pages) == (2, 3) for group in groups[1:])
    with_odd = groups_of([CacheSpec(3, 64, None), CacheSpec(2, 64, None)])
    assert [group.parts for group in with_odd] == [1, 1], "a third of the page is left"


@pytest.mark.parametrize(
    ("num_layers", "period", "full", "short"),
    [
        (60, 6, CacheSpec(4, 512, None), CacheSpec(16, 256, 1024)),  # gemma-4-31B
        (30, 6, CacheSpec(2, 512, None), CacheSpec(8, 256, 1024)),  # 26B-A4B
        (15, 5, CacheSpec(1, 512, None), CacheSpec(1, 256, 512)),  # E2B, without shared layers
        (24, 6, CacheSpec(2, 512, None), CacheSpec(2, 256, 512)),  # E4B
    ],
)
def test_little_is_lost_where_kinds_have_other_sizes(
    num_layers: int, period: int, full: CacheSpec, short: CacheSpec
) -> None:
    specs = [full if (i + 1) % period == 0 else short for i in range(num_layers)]
    groups = groups_of(specs, 32768)
    assert sorted(i for group in groups for i in group.layers) == list(range(num_layers))
    page = max(full.numbers, short.numbers)
    pages = max(group.num_pages for group in groups)
    context = 16384
    taken = page * pages * blocks_of_context(context, 64, [g.spec.window for g in groups])
    needed = sum(spec.numbers * blocks_of_context(context, 64, [spec.window]) for spec in specs)
    assert taken <= 1.2 * needed and len(groups) <= 16


def test_gemma_3_holds_four_times_the_contexts_of_8k() -> None:
    specs = pattern(62, 6)
    groups = groups_of(specs)
    size = max(len(group.layers) for group in groups)
    taken = size * blocks_of_context(8192, 64, [group.spec.window for group in groups])
    assert len(specs) * blocks_of_context(8192, 64, [None]) >= 4 * taken
