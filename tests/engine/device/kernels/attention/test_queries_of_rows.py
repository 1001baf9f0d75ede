"""Decode attention of rows with several queries against float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from paged_cache import make_paged_cache
from triton_device import (
    DEVICES,
    DEVICES_AND_DTYPES,
    assert_near,
    normal,
    poison,
    require_triton,
)

require_triton()

from termgen.engine.device.attention.base import kv_cache_view  # noqa: E402
from termgen.engine.device.attention.reference import paged_attention  # noqa: E402
from termgen.engine.device.attention.triton_paged import TritonPagedAttention  # noqa: E402
from termgen.engine.device.kernels.attention.decode_plan import (  # noqa: E402
    DecodeConfig,
    DecodeWorkspace,
    most_queries,
    plan_decode,
)
from termgen.engine.device.kernels.attention.paged_decode import paged_decode  # noqa: E402
from termgen.engine.device.kernels.kv_cache import (  # noqa: E402
    SCALED,
    head_items,
    kv_store_reference,
    read_slots,
)
from termgen.vocabulary.cache_groups import Chunk, Window  # noqa: E402

SMALL = DecodeConfig(tile=16, num_warps=4, num_stages=3, programs_per_sm=2)


def check(
    rows: list[tuple[int, int]],
    num_queries: int,
    *,
    group: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype,
    device: str,
    window: Window | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    config: DecodeConfig = SMALL,
    kind: torch.dtype | None = None,
) -> None:
    """rows: of each, keys before its queries, and queries, 0 for a padded row. The cache is NaN
    where no key is."""
    seq_lens = [before + queries if queries else 0 for before, queries in rows]
    num_heads, scale = group * num_kv_heads, head_dim**-0.5
    sinks = normal(num_heads, dtype=torch.float32, device=device, seed=2, scale=3.0)
    sinks_or_none = sinks if has_sinks else None
    cache, table = make_paged_cache(
        seq_lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        heads_first=block_size == 64,
        seed=len(rows),
    )
    exact = cache
    if kind is not None:
        num_blocks = len(cache)
        page = 2 * block_size * num_kv_heads * head_items(head_dim, kind)
        sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        pages = torch.zeros(num_blocks, page, dtype=kind, device=device)
        slots = torch.arange(num_blocks * block_size, device=device)
        heads = cache.flatten(0, 1)
        cache = kv_cache_view(TritonPagedAttention, pages, **sizes)
        kv_store_reference(heads[:, 0], heads[:, 1], cache, slots)
        exact = read_slots(cache, slots, torch.float32).view(
            num_blocks, block_size, *heads.shape[1:]
        )
    size = len(rows) * num_queries
    q = normal(size, num_heads, head_dim, dtype=dtype, device=device, seed=1)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    places = [min(j, max(n - 1, 0)) for _, n in rows for j in range(num_queries)]
    first = [before for before, _ in rows for _ in range(num_queries)]
    live = [j < n for _, n in rows for j in range(num_queries)]
    positions = torch.tensor(
        [at + place * is_live for at, place, is_live in zip(first, places, live, strict=True)],
        device=device,
    )
    workspace = DecodeWorkspace(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_rows=64,
        max_queries=num_queries + 1,
        config=config,
        device=torch.device(device),
    )
    plan = workspace.new_plan()
    for buffer in (workspace.partial, workspace.softmax):
        buffer.fill_(float("nan"))
    counts = {"num_rows": len(rows), "num_queries": num_queries}
    plan_decode(lens, workspace, plan, num_kv_heads=num_kv_heads, window=window, **counts)
    out = poison(*q.shape, dtype=dtype, device=device)
    form: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": sinks_or_none,
    }
    paged_decode(
        q, cache, table, lens, plan, workspace, positions=positions, out=out, **counts, **form
    )
    assert not workspace.arrivals.any(), "the next launch would find arrivals"
    wanted = torch.tensor(live, device=device)
    ends = torch.tensor([0, *(n for _, n in rows)]).cumsum(0)
    expected = paged_attention(q[wanted], exact, table, lens, ends, **form)
    assert_near(out[wanted], expected, dtype)
    assert torch.isfinite(out).all(), "what is not asked for goes on through the model, too"


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(
    "window", [None, 1, 5, 16, 33, 1000, Chunk(1), Chunk(16), Chunk(33), Chunk(1000)], ids=str
)
def test_a_query_sees_what_is_before_it(
    device: str, dtype: torch.dtype, window: Window | None
) -> None:
    rows = [(0, 5), (15, 5), (14, 3), (0, 0), (126, 1), (40, 4), (11, 5)]
    check(rows, 5, dtype=dtype, device=device, window=window)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("window", [None, 33])
def test_several_queries_over_a_cache_with_scales(
    device: str, dtype: torch.dtype, kind: torch.dtype, window: Window | None
) -> None:
    rows = [(0, 5), (15, 5), (14, 3), (0, 0), (126, 1), (295, 4), (11, 5)]
    check(rows, 5, dtype=dtype, device=device, window=window, kind=kind)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(
    "form", [{"softcap": 2.0}, {"has_sinks": True}, {"has_sinks": True, "window": 30}]
)
def test_pieces_of_long_rows_are_added_up(
    device: str, dtype: torch.dtype, form: dict[str, Any]
) -> None:
    """Some queries see no key of a program's last tiles."""
    rows = [(3, 3), (695, 8), (0, 0), (31, 2), (32, 8)]
    check(rows, 8, group=3, dtype=dtype, device=device, **form)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(10))
def test_random_rows(device: str, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    num_queries = rng.randint(2, 9)
    rows = [
        (rng.choice((0, rng.randint(0, 80), rng.randint(0, 400))), rng.randint(0, num_queries))
        for _ in range(rng.randint(1, 7))
    ]
    check(
        rows,
        num_queries,
        group=rng.randint(1, 6),
        num_kv_heads=rng.choice((1, 2, 3)),
        head_dim=rng.choice((64, 96)),
        block_size=rng.choice((1, 4, 16, 64)),
        dtype=torch.float32,
        device=device,
        window=rng.choice((None, rng.randint(1, 200), Chunk(rng.randint(1, 200)))),
        config=DecodeConfig(16, 4, 3, rng.randint(1, 4), min_tiles=rng.randint(1, 3)),
    )


def test_a_program_holds_no_more_queries_than_its_registers() -> None:
    assert most_queries(4, 128) == 16 and most_queries(8, 64) == 16
    assert most_queries(2, 256) == 16 and most_queries(64, 512) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [{}, {"window": 4096}, {"softcap": 2.0}, {"has_sinks": True}])
def test_full_size(dtype: torch.dtype, form: dict[str, Any]) -> None:
    rows = [(32 * 1024 - 7, 4)] + [(600, n % 5) for n in range(31)]
    sizes = {"group": 4, "num_kv_heads": 8, "head_dim": 128, "block_size": 64}
    config = DecodeConfig(tile=64, num_warps=4, num_stages=3, programs_per_sm=2)
    check(rows, 4, dtype=dtype, device="cuda", config=config, **sizes, **form)
