"""Attention of rows with many queries against float64, through both cache layouts."""

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

from termgen.engine.device.attention.reference import paged_attention  # noqa: E402
from termgen.engine.device.kernels.attention.paged_prefill import (  # noqa: E402
    can_use_tma,
    paged_prefill,
)
from termgen.engine.device.kernels.attention.prefill_plan import (  # noqa: E402
    PLAN_FIELDS,
    PrefillConfig,
    can_specialise,
    default_config,
    max_tiles,
    plan_prefill,
)
from termgen.vocabulary.cache_groups import Chunk, Window  # noqa: E402

PORTABLE = PrefillConfig(rows=64, tile=64, num_warps=4, num_stages=3)
SMALL = PrefillConfig(rows=16, tile=16, num_warps=4, num_stages=3)


class Case:
    """rows: (computed, new tokens) each; the cache is NaN outside the sequences."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        config: PrefillConfig | None = None,
        heads_first: bool = False,
        softcap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        lengths = [computed + new for computed, new in rows]
        self.cache, self.table = make_paged_cache(
            lengths,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
            heads_first=heads_first,
            seed=len(rows) + head_dim,
        )
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        new = torch.tensor([0] + [n for _, n in rows])
        self.starts = new.cumsum(0).to(device, torch.int32)
        self.num_tokens, self.num_rows = int(new.sum()), len(rows)
        self.q = normal(self.num_tokens, num_heads, head_dim, dtype=dtype, device=device, seed=1)
        self.scale = head_dim**-0.5
        self.softcap, self.sinks = softcap, None
        if has_sinks:
            self.sinks = normal(num_heads, dtype=torch.float32, device=device, seed=2, scale=3.0)
        self.dtype = dtype
        self.group = num_heads // num_kv_heads
        longest = max(n for _, n in rows)
        self.config = config or default_config(
            head_dim,
            dtype,
            group=self.group,
            max_query_len=longest,
            block_size=block_size,
            can_specialise=can_use_tma(self.cache, 64)
            and can_specialise(
                self.cache.device,
                head_dim=head_dim,
                dtype=dtype,
                kv_cache_dtype=dtype,
                block_size=block_size,
            ),
        )

    def run(self, *, window: Window | None = None, first_row: int = 0) -> torch.Tensor:
        first_token = int(self.starts[first_row])
        num_tiles = max_tiles(
            self.num_tokens - first_token,
            self.num_rows - first_row,
            config=self.config,
            group=self.group,
        )
        fields = PLAN_FIELDS.value
        plan = torch.full((num_tiles + 1, fields), 2**30, dtype=torch.int32, device=self.q.device)
        plan_prefill(
            self.starts,
            self.seq_lens,
            plan,
            config=self.config,
            group=self.group,
            first_row=first_row,
            num_rows=self.num_rows,
            num_tiles=num_tiles,
        )
        assert (plan[-1] == 2**30).all(), "wrote past the plan"
        out = poison(*self.q.shape, dtype=self.dtype, device=str(self.q.device))
        return paged_prefill(
            self.q,
            self.cache,
            self.table,
            plan,
            config=self.config,
            num_tiles=num_tiles,
            scale=self.scale,
            window=window,
            softcap=self.softcap,
            sinks=self.sinks,
            out=out,
        )

    def expected(self, *, window: Window | None = None) -> torch.Tensor:
        return paged_attention(
            self.q,
            self.cache,
            self.table,
            self.seq_lens,
            self.starts,
            scale=self.scale,
            window=window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def check(self, *, window: Window | None = None) -> None:
        actual = self.run(window=window)
        assert_near(actual, self.expected(window=window), self.dtype)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(64, 16), (64, 64), (80, 16), (96, 64), (128, 64), (192, 16), (256, 64), (512, 16)],
)
def test_head_sizes(device: str, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    rows = [(0, 70), (33, 3), (20, 1), (0, 1)]
    case = Case(
        rows,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        heads_first=block_size == 64,
    )
    assert can_use_tma(case.cache, 64) == (block_size == 64 and dtype.itemsize == 2)
    case.check()
    case.check(window=40)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("group", range(1, 9))
def test_heads_that_share_a_key_head(device: str, dtype: torch.dtype, group: int) -> None:
    case = Case(
        [(0, 21), (9, 5)],
        num_heads=group * 3,
        num_kv_heads=3,
        dtype=dtype,
        device=device,
        config=SMALL,
    )
    case.check()


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(
    ("block_size", "heads_first"), [(1, False), (4, True), (16, False), (16, True), (64, True)]
)
def test_block_edges(device: str, dtype: torch.dtype, block_size: int, heads_first: bool) -> None:
    rows = [(block_size + d, max(1, 2 * block_size + e)) for d in (-1, 0, 1) for e in (-1, 0, 1)]
    case = Case(
        rows[:: 2 if block_size > 16 else 1],
        block_size=block_size,
        dtype=dtype,
        device=device,
        config=None if block_size > 16 else SMALL,
        heads_first=heads_first,
    )
    case.check()
    case.check(window=block_size)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(
    "window", [1, 5, 16, 33, 1000, Chunk(1), Chunk(16), Chunk(33), Chunk(48), Chunk(1000)], ids=str
)
def test_windows(device: str, dtype: torch.dtype, window: Window) -> None:
    case = Case([(0, 60), (50, 17), (100, 1)], dtype=dtype, device=device, config=SMALL)
    case.check(window=window)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("window", [None, 7])
def test_padding_is_zeros(device: str, dtype: torch.dtype, window: int | None) -> None:
    case = Case([(0, 20), (3, 9), (5, 1), (0, 18)], dtype=dtype, device=device, config=SMALL)
    for row in (1, 3):
        case.seq_lens[row] = 0
        case.table[row] = 2**30
    case.check(window=window)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_before_the_first_are_left_alone(device: str) -> None:
    case = Case([(8, 1), (30, 1), (4, 19), (0, 3)], device=device, config=SMALL)
    actual, expected = case.run(first_row=2), case.expected()
    assert actual[:2].isnan().all()
    assert_near(actual[2:], expected[2:], case.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(device: str, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    num_kv_heads = rng.choice((1, 2))
    rows = [
        (rng.choice((0, rng.randint(0, 100))), rng.choice((1, 2, rng.randint(1, 90))))
        for _ in range(rng.randint(1, 5))
    ]
    case = Case(
        rows,
        num_heads=num_kv_heads * rng.randint(1, 8),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((64, 96)),
        block_size=rng.choice((1, 4, 16, 32, 64)),
        device=device,
        config=PrefillConfig(rng.choice((16, 32, 64)), rng.choice((16, 32)), 4, 3),
        heads_first=rng.random() < 0.5,
    )
    case.check(window=rng.choice((None, rng.randint(1, 200), Chunk(rng.randint(1, 200)))))


FORMS: list[dict[str, Any]] = [{"softcap": 2.0}, {"has_sinks": True}]


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("form", [*FORMS, {"softcap": 2.0, "has_sinks": True}])
def test_soft_caps_and_sinks(device: str, dtype: torch.dtype, form: dict[str, Any]) -> None:
    rows = [(0, 60), (50, 17), (0, 1), (3, 9)]
    case = Case(rows, num_heads=6, dtype=dtype, device=device, config=SMALL, **form)
    case.seq_lens[3] = 0
    case.table[3] = 2**30
    case.check()
    case.check(window=16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [{}, *FORMS])
def test_full_size(dtype: torch.dtype, form: dict[str, Any]) -> None:
    rows = [(0, 2048), (4000, 512), (1000, 1), (31000, 100)]
    for block_size in (16, 64):
        case = Case(
            rows,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            block_size=block_size,
            dtype=dtype,
            device="cuda",
            heads_first=True,
            config=None if form.get("softcap") is None else PORTABLE,
            **form,
        )
        case.check()
        case.check(window=700)
        case.check(window=Chunk(1024))
        case.check(window=Chunk(1000))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "window"),
    [
        (64, 1, 64, None),
        (64, 4, 64, 100),
        (64, 7, 256, None),
        (128, 2, 64, 100),
        (128, 5, 64, 1),
        (128, 8, 128, None),
        (64, 4, 64, Chunk(512)),
        (128, 5, 64, Chunk(1024)),
        (128, 2, 128, Chunk(300)),
    ],
)
def test_warps_that_copy_beside_warps_that_compute(
    head_dim: int,
    group: int,
    block_size: int,
    window: Window | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    # Rows of every kind among more tiles than there are programs, and two of padding.
    rows = [(0, 1), (63, 1), (0, 64), (1, 64), (700, 33), (5, 0), (0, 1999), (900, 7), (4095, 258)]
    case = Case(
        rows,
        num_heads=8 * group,
        num_kv_heads=8,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cuda",
        heads_first=True,
        has_sinks=has_sinks,
    )
    assert case.config.specialised == (torch.cuda.get_device_capability()[0] == 9)
    for row in (2, 7):
        case.seq_lens[row] = 0
        case.table[row] = 2**30
    case.check(window=window)
