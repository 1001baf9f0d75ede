"""Random keys, values and queries of a step, for any attention backend, and the expected output."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from paged_model import CPU, BlockPool, Row, nan_cache

from termgen.engine.device.attention.base import (
    CHUNKS,
    SINKS,
    SOFTCAP,
    UNEQUAL_LAYERS,
    AttentionBackend,
    AttentionForm,
    AttentionShape,
)
from termgen.engine.device.attention.reference import paged_attention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.kernels.kv_cache import (
    SCALED,
    dequantized,
    fill_with_nan,
    kv_store_reference,
    quantized,
    queries_for,
    read_slots,
    spread,
)
from termgen.vocabulary.cache_groups import Chunk, Window, first_key
from termgen.vocabulary.device.kv_cache_types import LayerScales

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class AttentionCase:
    """Keys and values of whole sequences in random blocks of a cache that is NaN elsewhere."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],  # (computed, new tokens), decodes first
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
        seed: int = 0,
        backend: type[AttentionBackend] = TorchReferenceAttention,
        windows: tuple[Window | None, ...] = (None,),
        max_num_seqs: int | None = None,
        max_num_tokens: int | None = None,
        softcap: float | None = None,
        sinks: Sequence[float] | None = None,
        scale: float | None = None,
        cache_scales: LayerScales | None = None,
        num_parts: int = 1,
        part: int = 0,
    ) -> None:
        """num_parts: layers to a page of the cache, of which this one has that `part`."""
        generator = torch.Generator().manual_seed(seed)
        self.rows = [Row(key, computed, [0] * new) for key, (computed, new) in enumerate(rows)]
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.cache_scales = cache_scales
        self.sinks = None if sinks is None else torch.tensor(sinks, device=device)
        needs = {SOFTCAP} if softcap is not None else set()
        needs |= {SINKS} if sinks is not None else set()
        needs |= {UNEQUAL_LAYERS} if num_parts > 1 else set()
        needs |= {CHUNKS} if any(isinstance(window, Chunk) for window in windows) else set()
        num_blocks = 2 + sum(-(-(c + n) // block_size) for c, n in rows)
        self.pool = BlockPool(num_blocks, block_size, seed)
        self.metadata, _ = self.pool.metadata(self.rows, device)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        kv_dtype = kv_cache_dtype or dtype
        self.keys, self.values = (
            # Rounded as in the cache, so that the oracle sees what the backend sees.
            [as_cached(normal(c + n, num_kv_heads, head_dim), kv_dtype, is_key) for c, n in rows]
            for is_key in (True, False)
        )
        if cache_scales is not None:
            # An fp8 cache has these numbers exactly, and so it has their multiples.
            self.keys, self.values = (
                [heads.float() * scale for heads in of_rows]
                for of_rows, scale in zip((self.keys, self.values), cache_scales, strict=True)
            )
        self.queries = [normal(n, num_heads, head_dim) for _, n in rows]
        self.shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            windows=windows,
            block_size=block_size,
            max_num_seqs=max_num_seqs or len(rows),
            max_num_tokens=max_num_tokens or sum(new for _, new in rows),
            dtype=dtype,
            kv_cache_dtype=kv_dtype,
            device=device,
            needs=frozenset(needs),
        )
        self.backend = backend(self.shape)
        self.cache = nan_cache(
            self.backend,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=kv_dtype,
            device=device,
            num_parts=num_parts,
            part=part,
        )
        for row, key, value in zip(self.rows, self.keys, self.values, strict=True):
            table = self.pool.tables[row.key]
            places = range(row.computed + len(row.tokens))
            slots = [table[i // block_size] * block_size + i % block_size for i in places]
            kv_store_reference(
                key, value, self.cache, torch.tensor(slots, device=device), cache_scales
            )

    def give_up_unseen(self, window: Window) -> None:
        """Fill the blocks that no query of this step sees with NaN."""
        for row in self.rows:
            num_unseen = first_key(row.computed, window) // self.pool.block_size
            for block in self.pool.tables[row.key][:num_unseen]:
                fill_with_nan(self.cache, torch.tensor([block], device=self.cache.device))

    def run(
        self,
        *,
        window: Window | None = None,
    ) -> torch.Tensor:
        self.backend.prepare(self.metadata)
        return self.backend.forward(
            queries_for(self.cache, torch.cat(self.queries)),
            self.cache,
            self.metadata,
            AttentionForm(self.scale, window, self.softcap, self.sinks, self.cache_scales),
        )

    def expected(self, *, window: Window | None = None) -> torch.Tensor:
        """The oracle: one request and one head at a time, in float64."""
        results = []
        for row, queries, keys, values in zip(
            self.rows, self.queries[: len(self.rows)], self.keys, self.values, strict=True
        ):
            group_size = queries.shape[1] // keys.shape[1]
            position = torch.arange(len(keys), device=keys.device)
            distance = position[row.computed :, None] - position  # [new tokens, keys]
            seen = distance >= 0
            if isinstance(window, Chunk):
                chunk = position // window.size
                seen &= chunk[row.computed :, None] == chunk
            elif window is not None:
                seen &= distance < window
            out = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
            for head in range(queries.shape[1]):
                k = keys[:, head // group_size].double()
                v = values[:, head // group_size].double()
                scores = queries[:, head].double() @ k.T * self.scale
                if self.softcap is not None:
                    scores = self.softcap * (scores / self.softcap).tanh()
                weights = scores.exp().masked_fill(~seen, 0.0)
                total = weights.sum(-1, keepdim=True)
                if self.sinks is not None:
                    total = total + self.sinks[head].double().exp()
                out[:, head] = weights / total @ v
            results.append(out)
        return torch.cat(results)

    def reference(self, *, window: Window | None = None) -> torch.Tensor:
        """`expected` from the cache: the page that readers of attention begin with."""
        metadata, cache = self.metadata, self.cache
        queries = torch.cat(self.queries)
        if cache.dtype in SCALED:
            queries = spread(queries.double())
        if cache.dtype in SCALED or self.cache_scales is not None:
            slots = torch.arange(cache.shape[0] * cache.shape[1], device=cache.device)
            cache = read_slots(cache, slots, torch.float64)
            if self.cache_scales is not None:
                cache *= torch.tensor(self.cache_scales, device=cache.device)[:, None, None]
            cache = cache.view(-1, self.cache.shape[1], *cache.shape[1:])
        return paged_attention(
            queries,
            cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale=self.scale,
            window=window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def check(self, *, window: Window | None = None) -> None:
        actual = self.run(window=window)
        expected = self.expected(window=window)
        torch.testing.assert_close(self.reference(window=window), expected)
        tolerance = TOLERANCE[actual.dtype]
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def as_cached(heads: torch.Tensor, dtype: torch.dtype, is_key: bool) -> torch.Tensor:
    """heads [..., head_dim] rounded to a cache's type. What a scaled one holds is not exact in a
    half type: it is float64. Its keys are taken back from where they are spread."""
    if dtype in SCALED:
        rounded = dequantized(*quantized(spread(heads) if is_key else heads, dtype)).double()
        return spread(rounded) if is_key else rounded
    return heads.to(dtype).to(heads.dtype)


def random_rows(rng: random.Random, block_size: int) -> list[tuple[int, int]]:
    """Decodes first; lengths at and beside block edges are as likely as all others together."""

    def length(least: int) -> int:
        edge = rng.randint(1, 5) * block_size + rng.randint(-1, 1)
        return max(least, rng.choice((edge, rng.randint(least, 6 * block_size))))

    decodes = [(length(0), 1) for _ in range(rng.randint(0, 5))]
    prefills = [(rng.choice((0, length(0))), length(2)) for _ in range(rng.randint(0, 4))]
    return decodes + prefills or [(0, 3)]
