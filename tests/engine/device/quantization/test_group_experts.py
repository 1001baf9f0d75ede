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
from termgen.engine.device.native.int8_blocks import dequantize  # noqa: E402
from termgen.engine.device.quantization.group_experts import (  # noqa: E402
    Form,
    GroupExperts,
    form_of,
)
from termgen.engine.device.quantization.mxfp4 import VALUES  # noqa: E402
from termgen.errors import CorruptFileError  # noqa: E402

TILES = {
    "16": ExpertTiles(16, Tile(16, 2, 2, 2, 1), Tile(32, 2, 4, 3, 1), chunk=16, scan=64),
    "32": ExpertTiles(32, Tile(32, 2, 4, 2, 3), Tile(32, 4, 4, 2, 2), chunk=64, scan=256),
    "64": ExpertTiles(64, Tile(64, 2, 4, 3, 8), Tile(64, 2, 4, 2, 1), chunk=32, scan=128),
}
LONE = ExpertTiles(1, Tile(4, 32, 1, 1, 1), Tile(8, 64, 2, 1, 1), chunk=16, scan=64)
cuts = pytest.mark.parametrize("tiles", TILES.values(), ids=TILES.keys())
forms = pytest.mark.parametrize("form", Form, ids=lambda form: form.name)
devices_and_dtypes = pytest.mark.parametrize(
    ("device", "dtype"), [p for p in DEVICES_AND_DTYPES if p.id not in ("cuda-f32", "cuda-f16")]
)


def make_experts(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> GroupExperts:
    build = Build(dtype, torch.device(device), FloatLinear, TorchOps())
    return GroupExperts(shape, build, 8)


def mxfp4_rows(num_rows: int, num_columns: int, device: str, seed: int) -> StoredRows:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_rows, num_columns // 32, 17), generator=generator)
    blocks[:, :, 0] = blocks[:, :, 0] % 4 + 118
    return StoredRows("MXFP4", blocks.to(torch.uint8).to(device))


def fill(experts: GroupExperts, form: Form, seed: int) -> None:
    num, num_rows, num_columns = experts.shape
    device = str(experts._spec.device)
    for expert in range(num):
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
    return torch.stack([dequantize(experts.stored(i))[:, :num_columns] for i in range(num)])


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
        # The kernel rounds weights to x's type without their rows' scales, which are powers of two.
        weights = (floats(part).to(self.x.dtype).float() for part in (self.gate_up, self.down))
        expected = TorchOps().experts(self.x.float(), self.logits.float(), *weights, **options)
        assert_near(self.run(tiles), expected, self.x.dtype)


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
    hidden, inner = (32, 32) if form is Form.FLOATS else (44, 36)
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


@pytest.mark.parametrize("first", Form, ids=lambda form: form.name)
@pytest.mark.parametrize("second", Form, ids=lambda form: form.name)
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
