"""Decode attention against float64, through both cache layouts, split and whole."""

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
from termgen.engine.device.kernels.attention.decode_plan import (  # noqa: E402
    DecodeConfig,
    DecodeWorkspace,
    default_config,
    plan_decode,
)
from termgen.engine.device.kernels.attention.paged_decode import paged_decode  # noqa: E402
from termgen.vocabulary.cache_groups import Chunk, Window  # noqa: E402

SMALL = DecodeConfig(tile=16, num_warps=4, num_stages=3, programs_per_sm=2)


class Case:
    """Rows of random contexts in random blocks of a cache that is NaN elsewhere."""

    def __init__(
        self,
        seq_lens: list[int],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        config: DecodeConfig | None = None,
        heads_first: bool = False,
        softcap: float | None = None,
        has_sinks: bool = False,
        max_rows: int = 64,
    ) -> None:
        self.cache, self.table = make_paged_cache(
            seq_lens,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
            heads_first=heads_first,
            seed=len(seq_lens) + head_dim,
        )
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        self.q = normal(len(seq_lens), num_heads, head_dim, dtype=dtype, device=device, seed=1)
        self.scale = head_dim**-0.5
        self.softcap, self.sinks = softcap, None
        if has_sinks:
            self.sinks = normal(num_heads, dtype=torch.float32, device=device, seed=2, scale=3.0)
        self.dtype = dtype
        self.workspace = DecodeWorkspace(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_rows=max_rows,
            config=config or default_config(head_dim, dtype, dtype),
            device=torch.device(device),
        )
        self.plan = self.workspace.new_plan()
        for buffer in (self.workspace.partial, self.workspace.softmax):
            buffer.fill_(float("nan"))

    def run(self, *, window: Window | None = None) -> torch.Tensor:
        num_rows, num_kv_heads = len(self.seq_lens), self.cache.shape[3]
        self.plan.fill_(2**30)
        plan_decode(
            self.seq_lens,
            self.workspace,
            self.plan,
            num_rows=num_rows,
            num_kv_heads=num_kv_heads,
            window=window,
        )
        out = poison(*self.q.shape, dtype=self.dtype, device=str(self.q.device))
        paged_decode(
            self.q,
            self.cache,
            self.table,
            self.seq_lens,
            self.plan,
            self.workspace,
            num_rows=num_rows,
            scale=self.scale,
            window=window,
            softcap=self.softcap,
            sinks=self.sinks,
            out=out,
        )
        assert not self.workspace.arrivals.any(), "the next launch would find arrivals"
        return out

    def check(self, *, window: Window | None = None) -> None:
        expected = paged_attention(
            self.q,
            self.cache,
            self.table,
            self.seq_lens,
            torch.arange(len(self.q) + 1),
            scale=self.scale,
            window=window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        assert_near(self.run(window=window), expected, self.dtype)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(64, 16), (64, 64), (80, 16), (96, 64), (128, 64), (192, 16), (256, 64), (512, 16)],
)
def test_head_sizes(device: str, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    lengths = [17, 1, 150, 64, 65]
    case = Case(
        lengths,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        heads_first=block_size == 64,
    )
    case.check()
    case.check(window=40)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("group", range(1, 9))
def test_heads_that_share_a_key_head(device: str, dtype: torch.dtype, group: int) -> None:
    case = Case(
        [33, 7], num_heads=group * 3, num_kv_heads=3, dtype=dtype, device=device, config=SMALL
    )
    case.check()


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(
    ("block_size", "heads_first"), [(1, False), (4, True), (16, False), (16, True), (64, True)]
)
def test_block_edges(device: str, dtype: torch.dtype, block_size: int, heads_first: bool) -> None:
    lengths = [max(1, n * block_size + d) for n in (1, 2, 3) for d in (-1, 0, 1)]
    case = Case(
        lengths,
        block_size=block_size,
        dtype=dtype,
        device=device,
        config=SMALL,
        heads_first=heads_first,
    )
    case.check()
    case.check(window=block_size)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(
    "window", [1, 5, 16, 33, 1000, Chunk(1), Chunk(16), Chunk(33), Chunk(48), Chunk(1000)], ids=str
)
def test_windows(device: str, dtype: torch.dtype, window: Window) -> None:
    case = Case([1, 16, 40, 0, 130], dtype=dtype, device=device, config=SMALL)
    case.check(window=window)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_one_long_row_among_short_ones(device: str, dtype: torch.dtype) -> None:
    case = Case([3, 700, 9, 20], dtype=dtype, device=device, config=SMALL)
    case.check()
    programs = case.plan[:-1, 3]
    assert int(programs.max()) - int(programs[programs > 0].min()) <= int(case.plan[-1, 0])
    assert int((programs > 0).sum()) == len(programs) or device == "cuda"


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_lengths_give_the_same_bits(device: str) -> None:
    case = Case([3, 700, 9, 20], device=device, config=SMALL)
    first = case.run()
    for _ in range(3):
        assert torch.equal(case.run(), first)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_padding_is_zeros(device: str, dtype: torch.dtype) -> None:
    for lengths in ([0, 5, 0, 0, 90, 0], [0], [0] * 20, [40] + [0] * 40):
        case = Case(lengths, dtype=dtype, device=device, config=SMALL, num_heads=6)
        case.check()
        case.check(window=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(device: str, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    num_kv_heads, num_rows = rng.choice((1, 2, 5)), rng.randint(1, 9)
    case = Case(
        [rng.choice((0, 1, rng.randint(1, 80), rng.randint(1, 500))) for _ in range(num_rows)],
        num_heads=num_kv_heads * rng.randint(1, 8),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((64, 96)),
        block_size=rng.choice((1, 4, 16, 32, 64)),
        device=device,
        config=DecodeConfig(16, 4, 3, rng.randint(1, 4), min_tiles=rng.randint(1, 3)),
        heads_first=rng.random() < 0.5,
    )
    case.check(window=rng.choice((None, rng.randint(1, 200), Chunk(rng.randint(1, 200)))))


def plan_of(lengths: list[int], device: str) -> tuple[list[list[int]], int]:
    """The work of each program (row, head, first tile, tiles) with two key heads, and the tiles of
    a run."""
    workspace = DecodeWorkspace(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_rows=512,
        config=SMALL,
        device=torch.device(device),
    )
    plan = workspace.new_plan()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan_decode(seq_lens, workspace, plan, num_rows=len(lengths), num_kv_heads=2)
    return plan[:-1].tolist(), int(plan[-1, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_every_tile_is_dealt_out_once(device: str, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    num_rows = rng.randint(1, 60) if seed < 5 else rng.randint(1, 3)
    lengths = [rng.choice((0, rng.randint(1, 3000))) for _ in range(num_rows)]
    programs, run = plan_of(lengths, device)
    order = [
        (row, head, tile)
        for row, length in enumerate(lengths)
        for head in range(2)
        for tile in range(-(-length // SMALL.tile))
    ]
    dealt = 0
    for row, head, tile, num_tiles in programs:
        if num_tiles:
            assert order[dealt] == (row, head, tile)
            assert num_tiles <= run
        dealt += num_tiles
    assert dealt == len(order)


@pytest.mark.parametrize("device", DEVICES)
def test_runs_keep_to_one_head_unless_that_makes_them_much_longer(device: str) -> None:
    num_programs = len(plan_of([1], device)[0])

    def crossing(lengths: list[int]) -> int:
        tiles = [-(-length // SMALL.tile) for length in lengths]
        return sum(tile + n > tiles[row] for row, _, tile, n in plan_of(lengths, device)[0] if n)

    longest = 16 * num_programs  # a multiple of every even split below
    assert crossing([longest]) == 0
    assert crossing([longest] * (num_programs // 4)) == 0
    assert crossing([longest] + [16] * (num_programs // 2 - 1)) > 0
    assert crossing([16 * 7] * num_programs) > 0


FORMS: list[dict[str, Any]] = [{"softcap": 2.0}, {"has_sinks": True}]


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("form", [*FORMS, {"softcap": 2.0, "has_sinks": True}])
def test_soft_caps_and_sinks_of_split_rows(
    device: str, dtype: torch.dtype, form: dict[str, Any]
) -> None:
    """Rows that one program attends to, and rows whose pieces are added up."""
    case = Case([3, 700, 0, 20], num_heads=6, dtype=dtype, device=device, config=SMALL, **form)
    case.check()
    case.check(window=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [{}, *FORMS])
def test_full_size(dtype: torch.dtype, form: dict[str, Any]) -> None:
    lengths = [32 * 1024] + [600] * 31
    for block_size in (16, 64):
        case = Case(
            lengths,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            block_size=block_size,
            dtype=dtype,
            device="cuda",
            heads_first=True,
            **form,
        )
        case.check()
        case.check(window=4096)
        case.check(window=Chunk(8192))


@pytest.mark.gpu
def test_new_lengths_compile_nothing() -> None:
    from termgen.engine.device.kernels.attention import decode_plan
    from termgen.engine.device.kernels.attention import paged_decode as module

    kernels = (module._paged_decode_kernel, decode_plan._plan_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    Case([16, 16], device="cuda", dtype=torch.bfloat16).check()
    before = compiled()
    for lengths in ([1], [5, 900, 3], [0] * 16, list(range(1, 50))):
        Case(lengths, device="cuda", dtype=torch.bfloat16).check()
    assert compiled() == before
