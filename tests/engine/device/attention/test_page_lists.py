"""Page lists against ones made row by row in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from attention_case import random_rows
from paged_model import BlockPool, Row

from termgen.engine.device.attention.base import AttentionMetadata
from termgen.engine.device.attention.flashinfer_paged import PageLists, split_page_lists


def by_hand(
    metadata: AttentionMetadata, *, decodes: bool
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """tokens, qo_indptr, kv_indptr, last_page_len and indices, one row after another."""
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    tokens: list[int] = []
    qo_indptr, kv_indptr, last_page_len, indices = [0], [0], [], []
    seen_prefill = False
    for row in range(metadata.num_rows):
        new, length = starts[row + 1] - starts[row], seq_lens[row]
        if new == 0 or length == 0:
            continue
        seen_prefill |= new > 1
        if seen_prefill == decodes:
            continue
        tokens += range(starts[row], starts[row + 1])
        qo_indptr.append(len(tokens))
        left, column = length, 0
        while left > 0:
            indices.append(int(metadata.block_table[row, column]))
            last = min(left, metadata.block_size)
            left, column = left - last, column + 1
        last_page_len.append(last)
        kv_indptr.append(len(indices))
    return tokens, qo_indptr, kv_indptr, last_page_len, indices


def check(metadata: AttentionMetadata) -> tuple[PageLists | None, PageLists | None]:
    parts = split_page_lists(metadata)
    for part, decodes in zip(parts, (True, False), strict=True):
        tokens, *expected = by_hand(metadata, decodes=decodes)
        if part is None:
            assert not tokens
            continue
        at = part.tokens
        assert (list(range(at.start, at.stop)) if isinstance(at, slice) else at.tolist()) == tokens
        lists = (part.qo_indptr, part.kv_indptr, part.last_page_len, part.indices)
        assert [x.tolist() for x in lists] == expected
        assert all(x.dtype == torch.int32 for x in lists)
    return parts


def random_step(rng: random.Random, seed: int) -> AttentionMetadata:
    block_size = rng.choice((1, 4, 16))
    rows = [
        Row(key, computed, [0] * new)
        for key, (computed, new) in enumerate(random_rows(rng, block_size))
    ]
    num_blocks = 2 + sum(-(-(r.computed + len(r.tokens)) // block_size) for r in rows)
    return BlockPool(num_blocks, block_size, seed).metadata(rows)[0]


@pytest.mark.parametrize("seed", range(40))
def test_random_steps(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    metadata = random_step(rng, seed)
    whole = check(metadata)
    assert all(part is None or isinstance(part.tokens, slice) for part in whole)
    for row in range(metadata.num_rows):
        if rng.random() < 0.4:
            metadata.seq_lens[row] = 0
            metadata.block_table[row] = 2**30
    check(metadata)


def test_padded_rows_without_tokens_and_tokens_without_rows() -> None:
    metadata = random_step(random.Random(1), 1)
    total = int(metadata.query_start_loc[-1])
    metadata.query_start_loc = torch.cat((metadata.query_start_loc, torch.full((3,), total)))
    metadata.query_start_loc = metadata.query_start_loc.to(torch.int32)
    metadata.seq_lens = torch.cat((metadata.seq_lens, metadata.seq_lens.new_zeros(3)))
    padding = torch.full((3, metadata.block_table.shape[1]), 2**30, dtype=torch.int32)
    metadata.block_table = torch.cat((metadata.block_table, padding))
    metadata.num_rows += 3
    metadata.num_tokens += 5
    metadata.num_decodes = None
    check(metadata)


def test_a_padded_row_in_between_leaves_a_gap_in_the_tokens() -> None:
    rows = [Row(0, 9, [0]), Row(1, 3, [0]), Row(2, 0, [0] * 3)]
    metadata, _ = BlockPool(20, 4, 0).metadata(rows)
    metadata.seq_lens[1] = 0
    decode, prefill = check(metadata)
    assert decode is not None and decode.tokens == slice(0, 1)
    assert prefill is not None and prefill.tokens == slice(2, 5)
    metadata, _ = BlockPool(20, 4, 0).metadata([*rows[:2], Row(3, 5, [0])])
    metadata.seq_lens[1] = 0
    decode, prefill = check(metadata)
    assert prefill is None and decode is not None
    assert isinstance(decode.tokens, torch.Tensor) and decode.tokens.tolist() == [0, 2]


def test_nothing_but_padding() -> None:
    metadata = random_step(random.Random(0), 0)
    metadata.seq_lens.zero_()
    assert check(metadata) == (None, None)
