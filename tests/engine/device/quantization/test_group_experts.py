"""Experts in 4 and 8 bits on a GPU: what is kept, and its products in every cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import DEVICES_AND_DTYPES, assert_near, normal, require_triton

require_triton()

from termgen.engine.device.config.experts_config import GluClamp  # noqa: E402
from termgen.engine.device.kernels.moe import group_experts  # noqa: E402
from termgen.engine.device.kernels.moe.experts import (  # noqa: E402
    ExpertTiles,
    Tile,
    choose_tiles,
    experts,
)
from termgen.engine.device.layers.linear import Build, FloatLinear  # noqa: E402
from termgen.engine.device.layers.ops import TorchOps  # noqa: E402
from termgen.engine.device.layers.stored_rows import StoredRows  # noqa: E402
from termgen.engine.device.loader.weights import check_finite  # noqa: E402
from termgen.engine.device.native.int8_blocks import Quantized, dequantize  # noqa: E402
from termgen.engine.device.quantization.group_experts import (  # noqa: E402
    Form,
    GroupExperts,
    form_of,
)
from termgen.engine.device.quantization.mxfp4 import VALUES  # noqa: E402
from termgen.engine.device.quantization.stored_matrices import (  # noqa: E402
    FourBitFloats,
    PackedColumns,
    kept,
    nvfp4_rows,
)
from termgen.errors import CorruptFileError  # noqa: E402

TILES = {
    "16": ExpertTiles(16, Tile(16, 2, 2, 2, 1), Tile(32, 2, 4, 3, 1), chunk=16, scan=64),
    "32": ExpertTiles(32, Tile(32, 2, 4, 2, 3), Tile(32, 4, 4, 2, 2), chunk=64, scan=256),
    "64": ExpertTiles(64, Tile(64, 2, 4, 3, 8), Tile(64, 2, 4, 2, 1), chunk=32, scan=128),
}
LONE = ExpertTiles(1, Tile(4, 32, 1, 1, 1), Tile(8, 64, 2, 1, 1), chunk=16, scan=64)
cuts = pytest.mark.parametrize("tiles", TILES.values(), ids=TILES.keys())
AFFINE = [form for form in Form if form is not Form.HALVED]
forms = pytest.mark.parametrize("form", Form, ids=lambda form: form.name)
devices_and_dtypes = pytest.mark.parametrize(
    ("device", "dtype"), [p for p in DEVICES_AND_DTYPES if p.id not in ("cuda-f32", "cuda-f16")]
)


def part_build(dtype: torch.dtype, device: str) -> Build:
    return Build(dtype, torch.device(device), FloatLinear, TorchOps())


def make_experts(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> GroupExperts:
    return GroupExperts(shape, part_build(dtype, device), 8)


def mxfp4_rows(num_rows: int, num_columns: int, device: str, seed: int) -> StoredRows:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_rows, num_columns // 32, 17), generator=generator)
    blocks[:, :, 0] = blocks[:, :, 0] % 4 + 120
    return StoredRows("MXFP4", blocks.to(torch.uint8).to(device))


def nvfp4_matrix(num_rows: int, num_columns: int, seed: int) -> tuple[StoredRows, torch.Tensor]:
    """Random numbers, and what they stand for, float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "weight_packed": torch.randint(
            0, 256, (num_rows, num_columns // 2), generator=generator, dtype=torch.uint8
        ),
        "scale": torch.rand(num_rows, num_columns // 16, generator=generator)
        .add_(0.5)
        .mul_(100)
        .to(torch.float8_e4m3fn),
        "global_scale": torch.tensor([0.0007 * num_columns**-0.5]) * (1 + seed % 7),
    }
    rows = nvfp4_rows(tensors, 0, num_rows, is_divided=False)
    return rows, FourBitFloats((num_rows, num_columns)).rows(tensors, 0, num_rows)


def fill(experts: GroupExperts, form: Form, seed: int) -> None:
    num, num_rows, num_columns = experts.shape
    device = str(experts._spec.device)
    for expert in range(num):
        if form is Form.HALVED:
            # In two parts, each with a scale for all of it.
            half = num_rows // 2
            for part, first in enumerate((half, 0)):
                count = half if part else num_rows - half
                rows = nvfp4_matrix(count, num_columns, 100 * seed + 10 * expert + part)[0]
                experts._loaders[expert].load_stored(rows, first)
            continue
        if form is Form.FLOATS:
            rows = mxfp4_rows(num_rows, num_columns, device, 100 * seed + expert)
            experts._loaders[expert].load_stored(rows, 0)
            continue
        scale = num_columns**-0.5
        shape = (num_rows, num_columns)
        rows = normal(
            *shape, dtype=torch.float32, device=device, seed=100 * seed + expert, scale=scale
        )
        experts._matrices[expert].num_bits = form.num_bits
        # In two parts, as shards of a checkpoint come.
        experts._loaders[expert].load_rows(rows[5:], 5)
        experts._loaders[expert].load_rows(rows[:5], 0)
    experts.finalize()
    assert experts._form is form


def floats(experts: GroupExperts) -> torch.Tensor:
    num, _, num_columns = experts.shape
    if experts._form is not Form.HALVED:
        return torch.stack([dequantize(experts.stored(i))[:, :num_columns] for i in range(num)])
    kept = [experts.stored(i) for i in range(num)]
    return torch.stack([halved_values(one) for one in kept])


def halved_values(kept: Quantized) -> torch.Tensor:
    values = torch.tensor(VALUES, device=kept.numbers.device)[(kept.numbers & 15).int()] * 2
    scales = torch.stack((kept.scale, kept.low), 2).float().flatten(1)
    return values * scales.repeat_interleave(16, 1) * kept.row_scale[:, None]


class Case:
    def __init__(
        self,
        num_tokens: int,
        form: Form,
        *,
        dtype: torch.dtype,
        device: str,
        num_experts: int = 6,
        top_k: int = 2,
        hidden: int = 96,
        inner: int = 64,
    ) -> None:
        self.x = normal(num_tokens, hidden, dtype=dtype, device=device, seed=1)
        ranks = normal(num_tokens, num_experts, dtype=dtype, device=device, seed=2)
        self.logits = (ranks.float().argsort(1) * 0.25).to(dtype)
        self.gate_up = make_experts((num_experts, 2 * inner, hidden), dtype, device)
        self.down = make_experts((num_experts, hidden, inner), dtype, device)
        fill(self.gate_up, form, 3)
        fill(self.down, form, 4)
        self.options: dict[str, Any] = {"top_k": top_k, "renormalize": True, "activation": "silu"}

    def run(self, tiles: ExpertTiles | None, rows: slice = slice(None)) -> torch.Tensor:
        x, logits = self.x[rows].contiguous(), self.logits[rows].contiguous()
        weights = self.gate_up.weights, self.down.weights
        return experts(x, logits, *weights, tiles=tiles, **self.options)

    def check(self, tiles: ExpertTiles | None) -> None:
        options = {
            key: value.float() if isinstance(value, torch.Tensor) else value
            for key, value in self.options.items()
        }
        weights = (self._rounded(part) for part in (self.gate_up, self.down))
        expected = TorchOps().experts(self.x.float(), self.logits.float(), *weights, **options)
        assert_near(self.run(tiles), expected, self.x.dtype)

    def _rounded(self, part: GroupExperts) -> torch.Tensor:
        """The kernel rounds weights to x's type without their rows' scales."""
        row_scale = part.row_scale[:, :, None]
        return (floats(part) / row_scale).to(self.x.dtype).float() * row_scale


@devices_and_dtypes
@forms
@cuts
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_numbers_of_tokens(
    device: str, dtype: torch.dtype, form: Form, tiles: ExpertTiles, num_tokens: int
) -> None:
    Case(num_tokens, form, dtype=dtype, device=device).check(tiles)


@devices_and_dtypes
@pytest.mark.parametrize("form", [Form.EIGHT_BITS, Form.FOUR_BITS], ids=lambda form: form.name)
@cuts
def test_odd_sizes(device: str, dtype: torch.dtype, form: Form, tiles: ExpertTiles) -> None:
    """Columns that fill no group, rows that fill no run of scales."""
    Case(5, form, dtype=dtype, device=device, hidden=75, inner=33).check(tiles)


# Its sums are those of integers of 16 bits: less than float32 has.
@pytest.mark.parametrize(
    ("device", "dtype"), [p for p in DEVICES_AND_DTYPES if not p.id.endswith("f32")]
)
@forms
def test_pairs_that_multiply_alone(device: str, dtype: torch.dtype, form: Form) -> None:
    hidden, inner = (32, 32) if form in (Form.FLOATS, Form.HALVED) else (44, 36)
    sizes = {"hidden": hidden, "inner": inner, "top_k": 1}
    case = Case(2, form, dtype=dtype, device=device, **sizes)
    for seed, (name, part) in enumerate({"gate_up": case.gate_up, "down": case.down}.items(), 5):
        bias = normal(*part.shape[:2], dtype=dtype, device=device, seed=seed)
        case.options[f"{name}_bias"] = bias
    case.check(LONE)
    alone = case.run(LONE)
    assert torch.equal(case.run(LONE, slice(1, 2)), alone[1:])
    case.x[:1] = float("nan")
    assert torch.equal(case.run(LONE)[1:], alone[1:])
    case.options["clamp"] = GluClamp(alpha=1.702, limit=0.4)
    case.x = case.x.nan_to_num(0.5)
    case.check(LONE)
    for option in ("clamp", "gate_up_bias", "down_bias"):
        del case.options[option]
    case.options |= {"weighs_inputs": True, "renormalize": False}
    case.check(LONE)
    case.check(TILES["16"])


@devices_and_dtypes
@forms
def test_biases_clamps_and_a_shared_expert(device: str, dtype: torch.dtype, form: Form) -> None:
    case = Case(9, form, dtype=dtype, device=device)
    for seed, (name, part) in enumerate({"gate_up": case.gate_up, "down": case.down}.items(), 5):
        bias = normal(*part.shape[:2], dtype=dtype, device=device, seed=seed)
        case.options[f"{name}_bias"] = bias
    plain = case.run(TILES["32"])
    case.options["clamp"] = GluClamp(alpha=1.702, limit=0.4)
    assert not torch.allclose(case.run(TILES["32"]), plain, atol=0.1)
    case.options["has_shared"] = True
    case.check(TILES["32"])


@devices_and_dtypes
@forms
def test_the_cut_that_serving_chooses(device: str, dtype: torch.dtype, form: Form) -> None:
    for num_tokens in (1, 12) if device == "cpu" else (1, 40, 100, 300, 900):
        sizes = {"num_experts": 8, "hidden": 64, "inner": 32}
        Case(num_tokens, form, dtype=dtype, device=device, **sizes).check(None)


@devices_and_dtypes
@forms
def test_a_token_does_not_see_the_others(device: str, dtype: torch.dtype, form: Form) -> None:
    """The result is the same bit by bit: alone, unsorted among few, and among many."""
    case = Case(10, form, dtype=dtype, device=device, num_experts=16, top_k=1)
    many = case.run(TILES["16"])
    assert torch.equal(case.run(TILES["16"], slice(2)), many[:2])
    assert torch.equal(case.run(TILES["16"], slice(7, 8)), many[7:8])


def test_values_of_mxfp4_are_kept_exactly() -> None:
    rows = mxfp4_rows(8, 64, "cpu", seed=9)
    experts = make_experts((1, 8, 64), torch.float32, "cpu")
    experts._loaders[0].load_stored(rows, 0)
    experts.finalize()
    blocks = rows.blocks.long()
    nibbles = torch.cat((blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4), 2)
    scale = torch.ldexp(torch.ones(8, 2), blocks[:, :, 0] - 127)
    expected = torch.tensor(VALUES)[nibbles] * scale[:, :, None]
    assert torch.equal(floats(experts)[0], expected.flatten(1))
    assert experts.weights.are_floats
    # 4 bits a number and 16 for 32 of them
    stored = sum(part.nbytes for part in experts.weights[:2])
    assert stored * 8 == 4.5 * 8 * 64


@pytest.mark.parametrize("first", AFFINE, ids=lambda form: form.name)
@pytest.mark.parametrize("second", AFFINE, ids=lambda form: form.name)
def test_matrices_that_are_not_alike_are_kept_exactly(first: Form, second: Form) -> None:
    """What is in 4 bits moves to 8 when a wider matrix comes."""
    alone = [make_experts((1, 40, 64), torch.float32, "cpu") for _ in range(2)]
    for part, form, seed in zip(alone, (first, second), (5, 6), strict=True):
        fill(part, form, seed)
    both = make_experts((2, 40, 64), torch.float32, "cpu")
    for expert, part in enumerate(alone):
        both.keep(expert, part.stored(0))
    assert both._form is (first if first is second else Form.EIGHT_BITS)
    expected = torch.cat([floats(part) for part in alone])
    assert torch.equal(floats(both), expected)
    assert form_of(both.stored(1)) is second


def test_values_of_nvfp4_are_kept_exactly() -> None:
    rows, values = nvfp4_matrix(8, 64, seed=9)
    experts = make_experts((1, 8, 64), torch.float32, "cpu")
    experts._loaders[0].load_stored(rows, 0)
    experts.finalize()
    torch.testing.assert_close(floats(experts)[0], values, rtol=1e-6, atol=0)
    # 4 bits a number and 8 for 16 of them, which take 16 here.
    assert sum(part.nbytes for part in experts.weights[:2]) * 8 == 5 * 8 * 64


@pytest.mark.parametrize("other", AFFINE, ids=lambda form: form.name)
@pytest.mark.parametrize("is_first", [False, True])
def test_nvfp4_beside_others_is_rounded(other: Form, is_first: bool) -> None:
    """In 8 bits: to one part in 255 of what 32 columns span."""
    experts = make_experts((2, 40, 64), torch.float32, "cpu")
    alone = make_experts((1, 40, 64), torch.float32, "cpu")
    fill(alone, other, 5)
    rows, values = nvfp4_matrix(40, 64, seed=6)
    for is_nvfp4 in (is_first, not is_first):
        if is_nvfp4:
            experts._loaders[0].load_stored(rows, 0)
        else:
            experts.keep(1, alone.stored(0))
    assert experts._form is Form.EIGHT_BITS
    found = floats(experts)
    assert torch.equal(found[1], floats(alone)[0])
    span = values.view(40, 2, 32).amax(2) - values.view(40, 2, 32).amin(2)
    error = (found[0] - values).abs().view(40, 2, 32).amax(2)
    assert (error <= span / 255 * 0.52).all()


def ordered_matrix(
    num_rows: int, num_columns: int, seed: int, order: int | None
) -> tuple[StoredRows, torch.Tensor]:
    """Integers of 4 bits in groups of 32 columns in a random order, and what they stand for."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(num_columns) // 32
    if order is not None:
        shuffled = torch.randperm(num_columns, generator=torch.Generator().manual_seed(order))
        groups = groups[shuffled]
    words, num_groups = (num_columns // 8, num_rows), num_columns // 32
    tensors = {
        "qweight": torch.randint(-(2**31), 2**31, words, generator=generator).int(),
        "qzeros": torch.full((num_groups, -(-num_rows // 8)), 0x77777777).int(),
        "scales": torch.rand(num_groups, num_rows, generator=generator)
        .add_(0.2)
        .mul_(0.3 * num_columns**-0.5)
        .half(),
        "g_idx": groups,
    }
    made = PackedColumns((num_rows, num_columns), 4, num_groups, is_awq=False, zero_offset=1)
    columns = None if order is None else groups.argsort(stable=True)
    rows = kept(made.integers(tensors, 0, num_rows), columns)
    return rows, made.rows(tensors, 0, num_rows)


@devices_and_dtypes
@pytest.mark.parametrize(
    ("num_tokens", "tiles"),
    [(1, TILES["16"]), (13, TILES["32"]), (2, LONE)],
    ids=["1", "13", "lone"],
)
def test_each_expert_has_an_order_of_its_own(
    device: str, dtype: torch.dtype, num_tokens: int, tiles: ExpertTiles
) -> None:
    if tiles is LONE and dtype is torch.float32:
        pytest.skip("its sums are those of integers of 16 bits")
    case = Case(num_tokens, Form.FOUR_BITS, dtype=dtype, device=device, hidden=96, inner=64)
    values = []
    for number, part in enumerate((case.gate_up, case.down)):
        num, num_rows, num_columns = part.shape
        made = GroupExperts(part.shape, part_build(dtype, device), 8)
        for expert in range(num):
            # The first has its columns as they are.
            order = 10 * number + expert if expert else None
            rows, exact = ordered_matrix(num_rows, num_columns, 20 * number + expert, order)
            made._loaders[expert].load_stored(StoredRows(rows.kind, rows.blocks[7:], rows.order), 7)
            made._loaders[expert].load_stored(StoredRows(rows.kind, rows.blocks[:7], rows.order), 0)
            values.append(exact.to(device))
        made.finalize()
        assert made._form is Form.FOUR_BITS and made.orders is not None
        assert "orders" in dict(made.named_buffers())
        setattr(case, ("gate_up", "down")[number], made)
    weights = torch.stack(values[:6]), torch.stack(values[6:])
    expected = TorchOps().experts(case.x.float(), case.logits.float(), *weights, **case.options)
    found = case.run(tiles)
    # Scales are rounded to 16 bits.
    error = (found.float() - expected).norm() / expected.norm()
    assert error < {torch.float32: 2e-3, torch.float16: 3e-3}.get(dtype, 2e-2), error
    case.x[:1] = float("nan")
    assert torch.equal(case.run(tiles)[1:], found[1:])


@pytest.mark.parametrize(
    ("first", "second", "is_kept"), [(1, 1, True), (1, 2, False), (None, 1, False)]
)
def test_parts_of_other_orders_are_rounded(
    first: int | None, second: int | None, is_kept: bool
) -> None:
    """Gate and up of an expert meet x in one order."""
    parts = [ordered_matrix(24, 64, seed, order) for seed, order in enumerate((first, second))]
    experts = make_experts((2, 48, 64), torch.float32, "cpu")
    for number, (rows, _) in enumerate(parts):
        experts._loaders[1].load_stored(rows, 24 * number)
    assert (experts.orders is not None) == is_kept
    assert experts._form is (Form.FOUR_BITS if is_kept else Form.EIGHT_BITS)
    values = torch.cat([exact for _, exact in parts])
    found = floats(experts)[1]
    if is_kept:
        assert experts.orders is not None
        assert torch.equal(experts.orders[0], torch.arange(64).int()), "one that is not loaded"
        found = torch.empty_like(found).index_copy_(1, experts.orders[1].long(), found)
    assert (found - values).abs().max() < 0.004 * (values.max() - values.min())


def test_a_row_that_is_not_finite_shows() -> None:
    experts = make_experts((2, 8, 64), torch.bfloat16, "cpu")
    rows = torch.ones(8, 64)
    experts[0] = rows
    rows[3, 5] = float("inf")
    experts[1] = rows
    experts.finalize()
    with pytest.raises(CorruptFileError, match="row_scale"):
        check_finite(experts)


def test_few_pairs_multiply_alone() -> None:
    def block(num_tokens: int, num_rows: int = 64, **options: Any) -> int:
        experts = make_experts((2, num_rows, 32), torch.bfloat16, "cpu")
        fill(experts, Form.FOUR_BITS, 1)
        sizes = {"num_experts": 128, "top_k": 8, "itemsize": 2, "stored": experts.weights}
        return choose_tiles(num_tokens, **{**sizes, **options}).block_m

    # 9 tokens are padded to 16, and take what 16 take.
    assert [block(n) for n in (1, 9, 16, 17, 8192)] == [1, 1, 1, 16, 128]
    # Rows of gate that are no whole fours; floats.
    assert block(1, num_rows=66) == block(1, stored=None) == 16


def test_a_tile_fits_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts((2, 64, 64), torch.bfloat16, "cpu")
    fill(experts, Form.EIGHT_BITS, 1)
    tile, x = Tile(128, 4, 8, 3, 16), torch.empty(1, 64, dtype=torch.bfloat16)

    def cut(kib: int) -> tuple[int, int]:
        monkeypatch.setattr(group_experts, "shared_bytes", lambda device: kib * 1024)
        fitted = group_experts.fitting(tile, 128, experts.weights, x, is_gated=True)
        return fitted.block_k, fitted.num_stages

    # A group of a stage: 256 rows of 36 bytes, and 128 of x of 64: 17 KiB.
    assert [cut(kib) for kib in (227, 163, 99, 48)] == [(4, 3), (4, 2), (2, 2), (2, 1)]


@pytest.mark.gpu
@forms
def test_a_recording_gives_what_eager_does(form: Form) -> None:
    """The result is the same bit by bit, padded or not, whatever values it was recorded with."""
    case = Case(32, form, dtype=torch.bfloat16, device="cuda", num_experts=64, top_k=4, hidden=256)
    case.run(None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x, logits = case.x.clone(), case.logits.clone()
    case.x.zero_()
    case.logits.zero_()
    with torch.cuda.graph(graph):
        out = experts(case.x, case.logits, case.gate_up.weights, case.down.weights, **case.options)
    case.x.copy_(x)
    case.logits.copy_(logits)
    graph.replay()
    assert torch.equal(out, case.run(None))
