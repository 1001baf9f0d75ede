"""Blocks of a context where layers keep different amounts of it."""

from __future__ import annotations

import random

import pytest

from termgen.vocabulary.cache_groups import (
    UNLIMITED,
    CacheGroup,
    Chunk,
    blocks_of_context,
    blocks_of_window,
    first_key,
    longest_context,
    tokens_held,
    window_name,
)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 17, 33])
def test_a_window_never_needs_more_than_its_blocks(window: int, block_size: int) -> None:
    most = 0
    for position in range(100):
        first = max(0, position - window + 1) // block_size
        most = max(most, position // block_size - first + 1)
    assert most <= blocks_of_window(window, block_size) - 1, "one is for steps in flight"
    assert most >= blocks_of_window(window, block_size) - 2


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 12, 16, 17, 24, 32, 33])
def test_a_chunk_needs_all_of_its_blocks(size: int, block_size: int) -> None:
    most = 0
    for position in range(600):
        first = first_key(position, Chunk(size))
        assert first // size == position // size and first % size == 0
        most = max(most, position // block_size - first // block_size + 1)
    assert most == blocks_of_window(Chunk(size), block_size) - 1, "one is for steps in flight"


def test_windows_have_names() -> None:
    names = [window_name(window) for window in (None, 1024, Chunk(8192))]
    assert names == ["full", "window 1,024", "chunk 8,192"]
    assert [CacheGroup.of(w, 2).name for w in (None, 1024, Chunk(8192))] == names


def test_blocks_of_a_context_add_up_over_groups() -> None:
    assert blocks_of_context(0, 16, (None, 32)) == 0
    assert blocks_of_context(17, 16, (None, None, 32)) == 6
    assert blocks_of_context(16_000, 16, (None,)) == 1000
    assert blocks_of_context(16_000, 16, (None, 32, 32)) == 1000 + 2 * 4


def test_the_longest_context_is_the_last_that_fits() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        size = rng.choice([1, 4, 16])
        windows = tuple(
            rng.choice([None, 3, 20, 64, Chunk(20), Chunk(64)]) for _ in range(rng.randint(1, 5))
        )
        num_blocks = rng.randint(0, 120)
        longest = longest_context(num_blocks, size, windows)
        if longest == UNLIMITED:
            assert None not in windows
            assert blocks_of_context(10**6, size, windows) <= num_blocks
        else:
            assert blocks_of_context(longest, size, windows) <= num_blocks
            assert blocks_of_context(longest + 1, size, windows) > num_blocks


def test_the_tokens_of_a_cache_are_a_number_that_can_be_shown() -> None:
    assert tokens_held(100, 16, (None,)) == 1600
    assert tokens_held(100, 16, (32,)) == 1600, "of many requests"
    assert tokens_held(100, 16, (None, 32)) == (100 - 4) * 16, "of one"
