from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from paged_model import CPU, BlockPool, Row

from termgen.engine.attention import torch_reference
from termgen.engine.attention.base import AttentionMetadata
from termgen.engine.attention.torch_reference import TorchReferenceAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case:
    """Random keys and values of whole sequences, and the steps that attend to them."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],  # (computed, new tokens), decodes first
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [Row(key, computed, [0] * new) for key, (computed, new) in enumerate(rows)]
        self.scale = head_dim**-0.5
        num_blocks = 2 + sum(-(-(c + n) // block_size) for c, n in rows)
        self.pool = BlockPool(num_blocks, block_size, seed)
        self.metadata, _ = self.pool.metadata(self.rows, device)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.keys = [normal(c + n, num_kv_heads, head_dim) for c, n in rows]
        self.values = [normal(c + n, num_kv_heads, head_dim) for c, n in rows]
        self.queries = [normal(n, num_heads, head_dim) for _, n in rows]
        backend = TorchReferenceAttention()
        shape = backend.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        for row, key, value in zip(self.rows, self.keys, self.values, strict=True):
            table = self.pool.tables[row.key]
            for position in range(row.computed):
                block, offset = table[position // block_size], position % block_size
                self.cache[block, offset, 0] = key[position]
                self.cache[block, offset, 1] = value[position]

    def run(
        self,
        *,
        sliding_window: int | None = None,
        backend: TorchReferenceAttention | None = None,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        backend = backend or TorchReferenceAttention()
        metadata = metadata or self.metadata
        backend.prepare(metadata)
        new_keys = [k[row.computed :] for row, k in zip(self.rows, self.keys, strict=True)]
        new_values = [v[row.computed :] for row, v in zip(self.rows, self.values, strict=True)]
        return backend.forward(
            torch.cat(self.queries),
            torch.cat(new_keys),
            torch.cat(new_values),
            self.cache,
            metadata,
            scale=self.scale,
            sliding_window=sliding_window,
        )

    def expected(self, *, sliding_window: int | None = None) -> torch.Tensor:
        """One request, one head and one query at a time, in float64."""
        results = []
        for row, queries, keys, values in zip(
            self.rows, self.queries, self.keys, self.values, strict=True
        ):
            group_size = queries.shape[1] // keys.shape[1]
            out = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
            for index in range(queries.shape[0]):
                end = row.computed + index + 1
                start = 0 if sliding_window is None else max(0, end - sliding_window)
                for head in range(queries.shape[1]):
                    k = keys[start:end, head // group_size].double()
                    v = values[start:end, head // group_size].double()
                    weights = torch.softmax(k @ queries[index, head].double() * self.scale, 0)
                    out[index, head] = weights @ v
            results.append(out)
        return torch.cat(results)

    def check(self, *, sliding_window: int | None = None) -> None:
        actual = self.run(sliding_window=sliding_window)
        expected = self.expected(sliding_window=sliding_window)
        tolerance = TOLERANCE[actual.dtype]
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def random_rows(rng: random.Random, block_size: int) -> list[tuple[int, int]]:
    """Decodes first; lengths at and beside block edges as often as anywhere else."""

    def length(least: int) -> int:
        edge = rng.randint(1, 5) * block_size + rng.randint(-1, 1)
        return max(least, rng.choice((edge, rng.randint(least, 6 * block_size))))

    decodes = [(length(0), 1) for _ in range(rng.randint(0, 5))]
    prefills = [(rng.choice((0, length(0))), length(2)) for _ in range(rng.randint(0, 4))]
    return decodes + prefills or [(0, 3)]


@pytest.mark.parametrize("seed", range(25))
def test_random_ragged_batches_match_the_oracle(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    block_size = rng.choice((1, 4, 16))
    num_kv_heads = rng.choice((1, 2, 3))
    case = Case(
        random_rows(rng, block_size),
        num_heads=num_kv_heads * rng.randint(1, 8),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((64, 80, 96, 128)),
        block_size=block_size,
        seed=seed,
    )
    case.check(sliding_window=rng.choice((None, None, 1, 3, block_size, 17)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    case = Case([(15, 1), (16, 1), (17, 1), (0, 9), (16, 5)], num_heads=6, dtype=dtype)
    case.check()
    case.check(sliding_window=5)


def test_one_row_of_each_kind() -> None:
    for rows in ([(0, 1)], [(31, 1)], [(0, 2)], [(0, 33)], [(7, 26)]):
        Case(rows).check()


def test_tiles_and_split_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(c, 1) for c in (0, 90, 3, 41, 40, 120, 1)]
    rows += [(0, 50), (60, 3), (9, 30), (0, 2), (5, 17)]
    monkeypatch.setattr(torch_reference, "_QUERY_TILE", 8)
    monkeypatch.setattr(torch_reference, "_MAX_GATHERED", 128)
    monkeypatch.setattr(torch_reference, "_MAX_SCORES", 600)
    monkeypatch.setattr(torch_reference, "_WORTH_A_GROUP", 10)
    case = Case(rows, num_heads=6)
    case.check()
    case.check(sliding_window=6)


def test_lengths_far_apart_are_computed_apart() -> None:
    case = Case([(2, 1), (1999, 1), (5, 1), (1200, 1)], block_size=16)
    backend = TorchReferenceAttention()
    backend.prepare(case.metadata)
    assert len(backend._groups) > 1
    case.check()


@pytest.mark.parametrize("sliding_window", [None, 4])
def test_batches_made_without_looking_at_the_device_are_the_same(
    monkeypatch: pytest.MonkeyPatch, sliding_window: int | None
) -> None:
    case = Case([(15, 1), (3, 1), (40, 1), (0, 20), (16, 2), (4, 9)])
    expected = case.run(sliding_window=sliding_window)
    monkeypatch.setattr(torch_reference, "_QUERY_TILE", 8)
    monkeypatch.setattr(
        torch_reference, "_batches_from_lengths", torch_reference._batches_from_bounds
    )
    torch.testing.assert_close(case.run(sliding_window=sliding_window), expected)


@pytest.mark.parametrize("with_prefill", [False, True])
def test_padded_rows_see_nothing_and_spoil_nothing(with_prefill: bool) -> None:
    rows = [(9, 1), (20, 1), (0, 1)] + ([(3, 6), (0, 2)] if with_prefill else [])
    case = Case(rows)
    case.metadata.seq_lens[2] = 0
    case.metadata.slot_mapping[2] = 0
    case.metadata.block_table[2] = 2**30
    for sliding_window in (None, 3):
        actual = case.run(sliding_window=sliding_window)
        expected = case.expected(sliding_window=sliding_window)
        others = [token for token in range(actual.shape[0]) if token != 2]
        torch.testing.assert_close(actual[others].double(), expected[others], atol=2e-5, rtol=2e-5)
        assert not actual[2].isnan().any()


def test_a_step_of_padding_alone() -> None:
    case = Case([(0, 1), (0, 1)])
    case.metadata.seq_lens.zero_()
    case.metadata.slot_mapping.zero_()
    assert torch.equal(case.run(), torch.zeros(2, 4, 64))


def test_all_rows_are_written_before_any_is_read() -> None:
    # Two rows share blocks: the second's first four tokens are written by the first, in this step.
    case = Case([(0, 6), (4, 3)])
    table = case.pool.tables
    case.metadata.block_table[1, 0] = table[0][0]
    case.keys[1][:4], case.values[1][:4] = case.keys[0][:4], case.values[0][:4]
    case.cache[table[1][0]] = float("nan")
    case.cache[table[0][0]] = float("nan")
    case.check()


def test_the_newest_token_is_in_the_cache_after_the_step() -> None:
    case = Case([(5, 1), (0, 3)])
    case.run()
    block = case.pool.tables[0][1]
    assert torch.equal(case.cache[block, 1, 0], case.keys[0][5])
    assert torch.equal(case.cache[block, 1, 1], case.values[0][5])
    assert case.cache[block, 2:].isnan().all()


def test_forward_needs_prepare_for_this_very_step() -> None:
    case, other = Case([(5, 1)]), Case([(5, 1)])
    backend = TorchReferenceAttention()
    backend.prepare(other.metadata)
    with pytest.raises(AssertionError, match="prepare"):
        backend.forward(
            case.queries[0],
            case.keys[0][5:],
            case.values[0][5:],
            case.cache,
            case.metadata,
            scale=1.0,
            sliding_window=None,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype) -> None:
    cuda = torch.device("cuda")
    rows = [(15, 1), (300, 1), (0, 1), (0, 20), (16, 2), (4, 9)]
    for sliding_window in (None, 7):
        Case(rows, num_heads=6, dtype=dtype, device=cuda).check(sliding_window=sliding_window)
