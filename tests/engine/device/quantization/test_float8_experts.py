"""Experts in 8-bit floats on a GPU: what is kept, and its products in every cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import DEVICES_AND_DTYPES, assert_near, normal, require_triton

require_triton()

from termgen.engine.device.config.experts_config import GluClamp  # noqa: E402
from termgen.engine.device.kernels.moe import float8_experts as kernel  # noqa: E402
from termgen.engine.device.kernels.moe.experts import (  # noqa: E402
    ExpertTiles,
    Tile,
    choose_tiles,
    experts,
)
from termgen.engine.device.kernels.moe.float8_experts import Float8Weights  # noqa: E402
from termgen.engine.device.layers.linear import Build, FloatLinear  # noqa: E402
from termgen.engine.device.layers.ops import TorchOps  # noqa: E402
from termgen.engine.device.layers.stored_rows import StoredRows  # noqa: E402
from termgen.engine.device.loader.weights import check_finite  # noqa: E402
from termgen.engine.device.quantization.float8_experts import Float8Experts  # noqa: E402
from termgen.engine.device.quantization.stored_matrices import ScaledNumbers  # noqa: E402
from termgen.errors import CorruptFileError  # noqa: E402

Block = tuple[int, int] | None
"""Rows and columns that share a scale; None: floats, which are rounded."""
TILES = {
    "16": ExpertTiles(16, Tile(16, 64, 2, 2, 1), Tile(32, 64, 4, 3, 1), chunk=16, scan=64),
    "32": ExpertTiles(32, Tile(32, 64, 4, 2, 3), Tile(32, 64, 4, 2, 2), chunk=64, scan=256),
    "64": ExpertTiles(64, Tile(64, 64, 4, 3, 8), Tile(64, 64, 4, 2, 1), chunk=32, scan=128),
}
BLOCKS: dict[str, Block] = {
    "blocks": (128, 128),
    "small blocks": (16, 128),
    "rows": (1, 0),
    "whole": (0, 0),
    "rounded": None,
}
cuts = pytest.mark.parametrize("tiles", TILES.values(), ids=TILES.keys())
scales = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
devices_and_dtypes = pytest.mark.parametrize(
    ("device", "dtype"), [p for p in DEVICES_AND_DTYPES if p.id not in ("cuda-f32",)]
)


def make_experts(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, *, keeps_floats: bool = False
) -> Float8Experts:
    build = Build(dtype, torch.device(device), FloatLinear, TorchOps())
    return Float8Experts(shape, build, keeps_floats=keeps_floats)


def stored_matrix(
    block: tuple[int, int], num_rows: int, num_columns: int, seed: int
) -> tuple[StoredRows, torch.Tensor]:
    """Random numbers as a file has them, and what they stand for, float32."""
    generator = torch.Generator().manual_seed(seed)
    block = block[0] or num_rows, block[1] or num_columns
    grid = -(-num_rows // block[0]), -(-num_columns // block[1])
    numbers = torch.randn(num_rows, num_columns, generator=generator).mul_(60)
    scale = torch.rand(grid, generator=generator).add_(0.3).div_(60 * num_columns**0.5)
    tensors = {"weight": numbers.to(torch.float8_e4m3fn), "scale": scale}
    matrix = ScaledNumbers((num_rows, num_columns), block)
    return matrix.float8(tensors, 0, num_rows), matrix.rows(tensors, 0, num_rows)


def fill(experts: Float8Experts, block: Block, seed: int, parts: int = 1) -> torch.Tensor:
    """The values of all, [num, rows, columns] float32. parts: matrices that each is in a file; the
    last expert's come first."""
    num, num_rows, num_columns = experts.shape
    values = torch.empty(experts.shape)
    for expert in reversed(range(num)):
        rows = num_rows // parts
        for part in range(parts):
            own = 1000 * seed + 10 * expert + part
            here = values[expert, part * rows : (part + 1) * rows]
            if block is None:
                here.copy_(
                    normal(rows, num_columns, dtype=torch.float32, device="cpu", seed=own)
                    .mul_(num_columns**-0.5)
                    .to(torch.float8_e5m2)  # has powers of two that e4m3 has with a row's scale
                    .float()
                )
                experts._loaders[expert].load_rows(here, part * rows)
                continue
            stored, found = stored_matrix(block, rows, num_columns, own)
            here.copy_(found)
            experts._loaders[expert].load_stored(stored, part * rows)
    experts.finalize()
    return values


class Case:
    def __init__(
        self,
        num_tokens: int,
        block: Block,
        *,
        dtype: torch.dtype,
        device: str,
        num_experts: int = 6,
        top_k: int = 2,
        hidden: int = 272,
        inner: int = 144,
    ) -> None:
        self.x = normal(num_tokens, hidden, dtype=dtype, device=device, seed=1)
        ranks = normal(num_tokens, num_experts, dtype=dtype, device=device, seed=2)
        self.logits = (ranks.float().argsort(1) * 0.25).to(dtype)
        self.gate_up = make_experts((num_experts, 2 * inner, hidden), dtype, device)
        self.down = make_experts((num_experts, hidden, inner), dtype, device)
        values = fill(self.gate_up, block, 3, parts=2), fill(self.down, block, 4)
        self.values = tuple(part.to(device) for part in values)
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
        x, logits = self.x.float(), self.logits.float()
        expected = TorchOps().experts(x, logits, *self.values, **options)
        assert_near(self.run(tiles), expected, self.x.dtype)


@devices_and_dtypes
@scales
@cuts
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_numbers_of_tokens(
    device: str, dtype: torch.dtype, block: Block, tiles: ExpertTiles, num_tokens: int
) -> None:
    """No weight is rounded in x's type: the values are those of float32."""
    Case(num_tokens, block, dtype=dtype, device=device).check(tiles)


@devices_and_dtypes
@scales
def test_odd_sizes(device: str, dtype: torch.dtype, block: Block) -> None:
    """Rows of parts that share no scales, and columns that fill no word."""
    Case(5, block, dtype=dtype, device=device, hidden=75, inner=33).check(TILES["32"])


@devices_and_dtypes
@pytest.mark.parametrize("block", [(128, 128), (1, 0)], ids=["blocks", "rows"])
def test_biases_clamps_and_a_shared_expert(device: str, dtype: torch.dtype, block: Block) -> None:
    case = Case(9, block, dtype=dtype, device=device)
    for seed, (name, part) in enumerate({"gate_up": case.gate_up, "down": case.down}.items(), 5):
        bias = normal(*part.shape[:2], dtype=dtype, device=device, seed=seed)
        case.options[f"{name}_bias"] = bias
    plain = case.run(TILES["32"])
    case.options["clamp"] = GluClamp(alpha=1.702, limit=0.4)
    assert not torch.allclose(case.run(TILES["32"]), plain, atol=0.1)
    case.options["has_shared"] = True
    case.check(TILES["32"])
    for option in ("clamp", "gate_up_bias", "down_bias", "has_shared"):
        del case.options[option]
    case.options |= {"weighs_inputs": True, "renormalize": False}
    case.check(TILES["16"])


@devices_and_dtypes
@pytest.mark.parametrize("block", [(128, 128), (1, 0)], ids=["blocks", "rows"])
def test_the_cut_that_serving_chooses(device: str, dtype: torch.dtype, block: Block) -> None:
    for num_tokens in (1, 12) if device == "cpu" else (1, 40, 100, 300, 900):
        sizes = {"num_experts": 8, "hidden": 64, "inner": 32}
        Case(num_tokens, block, dtype=dtype, device=device, **sizes).check(None)


@devices_and_dtypes
@pytest.mark.parametrize("block", [(128, 128), (1, 0)], ids=["blocks", "rows"])
def test_a_token_does_not_see_the_others(device: str, dtype: torch.dtype, block: Block) -> None:
    """The result is the same bit by bit: alone, unsorted among few, and among many."""
    case = Case(10, block, dtype=dtype, device=device, num_experts=16, top_k=1)
    many = case.run(TILES["16"])
    assert torch.equal(case.run(TILES["16"], slice(2)), many[:2])
    case.x[:7] = float("nan")
    assert torch.equal(case.run(TILES["16"])[7:], many[7:])


@scales
def test_a_matrix_has_8_bits_a_number_and_its_scales(block: Block) -> None:
    made = make_experts((3, 256, 512), torch.bfloat16, "cpu")
    fill(made, block, 1)
    stored = sum(part.numel() * part.element_size() for part in made.parameters())
    in_blocks = 3 * 256 // 16 * 4 * 4 if block is not None and 0 < block[1] else 0
    assert stored == 3 * 256 * 512 + 3 * 256 * 4 + in_blocks


@pytest.mark.parametrize("first", ["stored", "floats"])
@pytest.mark.parametrize("num_rows", [32, 30])
def test_floats_of_a_file_make_a_layer_floats(first: str, num_rows: int) -> None:
    """What was 8 bits keeps its values, in 16 bits."""
    for block in ((128, 128), (1, 0)):
        made = make_experts((3, num_rows, 300), torch.float32, "cpu", keeps_floats=True)
        stored, values = stored_matrix(block, num_rows, 300, seed=1)
        floats = normal(num_rows, 300, dtype=torch.float32, device="cpu", seed=2)
        order = (2, 0, 1) if first == "stored" else (0, 2, 1)
        for expert in order:
            if expert == 0:
                made[expert] = floats
            else:
                made.load_stored(expert, stored)
        made.finalize()
        assert isinstance(made.weights, torch.Tensor)
        assert sum(part.numel() for part in made.parameters()) == 3 * num_rows * 300
        torch.testing.assert_close(made.weights, torch.stack([floats, values, values]))


def test_a_row_that_is_not_finite_shows() -> None:
    made = make_experts((2, 8, 64), torch.bfloat16, "cpu")
    rows = torch.ones(8, 64)
    made[0] = rows
    rows[3, 5] = float("inf")
    made[1] = rows
    made.finalize()
    with pytest.raises(CorruptFileError, match="rows.scale"):
        check_finite(made)


def test_a_tile_fits_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tile, x = Tile(64, 64, 8, 3, 16), torch.empty(1, 64, dtype=torch.bfloat16)

    def cut(kib: int) -> tuple[int, int]:
        monkeypatch.setattr(kernel, "shared_bytes", lambda device: kib * 1024)
        fitted = kernel.float8_tile(tile, 64, x, is_gated=True)
        return fitted.block_n, fitted.num_stages

    # A stage: 128 rows of 256 bytes, and 64 of x of 512: 64 KiB.
    assert [cut(kib) for kib in (227, 163, 99, 48)] == [(64, 3), (64, 2), (32, 2), (32, 1)]


def test_few_tokens_take_small_tiles() -> None:
    made = make_experts((2, 64, 32), torch.bfloat16, "cpu")
    fill(made, (1, 0), 1)
    weights = made.weights
    assert isinstance(weights, Float8Weights)

    def block_m(num_tokens: int) -> int:
        sizes = {"num_experts": 128, "top_k": 8, "itemsize": 2, "stored": weights}
        return choose_tiles(num_tokens, **sizes).block_m  # type: ignore[arg-type]

    assert [block_m(n) for n in (1, 128, 129, 512, 8192)] == [16, 16, 32, 64, 64]


@pytest.mark.gpu
@scales
def test_a_recording_gives_what_eager_does(block: Block) -> None:
    """The result is the same bit by bit, padded or not, whatever values it was recorded with."""
    case = Case(32, block, dtype=torch.bfloat16, device="cuda", num_experts=64, top_k=4, hidden=256)
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


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (1, 0)], ids=["blocks", "rows"])
@pytest.mark.parametrize("num_tokens", [1, 16, 300, 4000])
def test_sizes_of_a_large_mixture_on_a_gpu(block: Block, num_tokens: int) -> None:
    sizes = {"num_experts": 32, "top_k": 8, "hidden": 2048, "inner": 768}
    Case(num_tokens, block, dtype=torch.bfloat16, device="cuda", **sizes).check(None)
