"""Weights in 4 and 8 bits on a GPU: what is kept, products of every number of rows, lookups."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from triton_device import DEVICES, DEVICES_AND_DTYPES, assert_near, normal, require_triton

from termgen.engine.device.layers.linear import Build, Linear, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.native.int8_blocks import dequantize, quantize_rows

require_triton()

from termgen.engine.device.kernels.gemm.small_gemm_config import (  # noqa: E402
    GROUP_BANDS,
    ByRows,
    Shape,
    SmallGemmConfig,
    Weights,
)
from termgen.engine.device.layers.triton_ops import TritonOps  # noqa: E402
from termgen.engine.device.quantization import int8_groups  # noqa: E402
from termgen.engine.device.quantization.affine_blocks import affine  # noqa: E402
from termgen.engine.device.quantization.gathered_rows import RoundedLinear  # noqa: E402
from termgen.engine.device.quantization.gguf_blocks import ROUNDED, expanded  # noqa: E402
from termgen.engine.device.quantization.halved_blocks import WIDTHS  # noqa: E402
from termgen.engine.device.quantization.int8_groups import (  # noqa: E402
    Group4Linear,
    GroupLinear,
    GroupLinears,
    choose,
)
from termgen.engine.device.quantization.planned import TILE, widths  # noqa: E402


def make_layer(num_rows: int, num_columns: int, dtype: torch.dtype, device: str) -> GroupLinear:
    spec = LinearSpec(num_columns, num_rows, dtype, torch.device(device), is_looked_up=True)
    layer = GroupLinears()(spec)
    assert isinstance(layer, GroupLinear)
    return layer


def gguf_rows(values: torch.Tensor, kind: str) -> StoredRows:
    packed = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind])
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = torch.from_numpy(packed.view(np.uint8).reshape(len(values), -1, size).copy())
    return StoredRows(kind, blocks)


def values_of(rows: StoredRows) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[rows.kind]
    return torch.from_numpy(gguf.quants.dequantize(rows.blocks.flatten(1).numpy(), kind).copy())


def check_products(layer: GroupLinear, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """weight: that of the layer in its type. Every way of multiplying, and looking up."""
    device = weight.device.type
    num_rows, num_columns = weight.shape
    bias = normal(num_rows, dtype=dtype, device=device, seed=1)
    for count in (0, 1, 3, 16, 17, 64, 65, 130):
        x = normal(count, num_columns, dtype=dtype, device=device, seed=count)
        for own in (None, bias):
            y = layer.multiply(x, own)
            assert y.dtype == dtype
            wide = None if own is None else own.double()
            assert_near(y, F.linear(x.double(), weight.double(), wide), dtype)
    ids = torch.tensor([5, 0, num_rows - 1, num_rows // 2], device=device)
    for kind in (torch.int64, torch.int32):
        assert torch.equal(layer.embed(ids.to(kind)), weight[ids])


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(96, 256), (70, 100)])
def test_floats_are_rounded_as_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    num_columns: int,
) -> None:
    monkeypatch.setattr(GroupLinear, "part_numbers", 33 * num_columns)  # more than one part
    monkeypatch.setattr(int8_groups, "_PART_NUMBERS", 33 * num_columns)
    rows = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(3))
    rows /= num_columns**0.5
    layer = make_layer(num_rows, num_columns, dtype, device)
    middle = num_rows // 3
    layer.load_rows(rows[middle:].to(device), middle)
    layer.load_rows(rows[:middle], 0)
    layer.finalize()
    quantized = quantize_rows(F.pad(rows, (0, -num_columns % 32)))
    weight = dequantize(quantized)[:, :num_columns]
    kept = layer.embed(torch.arange(num_rows, device=device))
    # A GPU divides otherwise: a number between two may become the other one.
    step = (quantized.scale.float() * quantized.row_scale[:, None]).repeat_interleave(32, 1)
    error = (kept.float().cpu() - weight).abs()
    rounding = weight.abs() * torch.finfo(dtype).eps
    assert (error <= 1.01 * step[:, :num_columns] + rounding).all()
    assert (error > 0.5 * step[:, :num_columns] + rounding).float().mean() < 0.01
    check_products(layer, kept, dtype)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_a_file_of_two_types_keeps_both_widths(device: str, dtype: torch.dtype) -> None:
    """The matrix of q, k and v in a Q4_K_M file has rows of 4 bits before rows of 8."""
    values = torch.randn(160, 512, generator=torch.Generator().manual_seed(5)) / 512**0.5
    layer = make_layer(160, 512, dtype, device)
    parts = gguf_rows(values[:96], "Q4_0"), gguf_rows(values[96:], "Q8_0")
    layer.load_stored(parts[1], 96)
    layer.load_stored(parts[0], 0)
    layer.finalize()
    assert [(run.first, run.end, run.num_bits) for run in layer._runs] == [
        (0, 96, 4),
        (96, 160, 8),
    ]
    assert layer.words_0.nbytes == 96 * 512 // 2
    assert layer.words_1.nbytes == 64 * 512
    weight = torch.cat([values_of(part) for part in parts])
    kept = layer.embed(torch.arange(160, device=device))
    # Scales are rounded to 16 bits, the weight to its type.
    error = (kept.float().cpu() - weight).abs().amax() / weight.abs().amax()
    assert error < (2e-3 if dtype.itemsize == 4 else 6e-3)
    check_products(layer, kept, dtype)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_floats_in_four_bits(device: str, dtype: torch.dtype) -> None:
    rows = torch.randn(70, 100, generator=torch.Generator().manual_seed(4)) / 10
    spec = LinearSpec(100, 70, dtype, torch.device(device), is_looked_up=False)
    layer = GroupLinears().in_4_bits(spec)
    assert isinstance(layer, Group4Linear)
    layer.load_rows(rows.to(device), 0)
    layer.finalize()
    assert [run.num_bits for run in layer._runs] == [4]
    weight = dequantize(quantize_rows(F.pad(rows, (0, 28)), 4))[:, :100]
    kept = layer.embed(torch.arange(70, device=device))
    # A GPU divides otherwise: a number between two may become the other one.
    is_near = (kept.float().cpu() - weight).abs() <= 0.01 * rows.abs().amax()
    assert is_near.float().mean() > 0.99
    check_products(layer, kept, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(RoundedLinear.kinds - ROUNDED - {"GROUPS"}))
def test_blocks_are_read_alike_on_a_gpu(kind: str) -> None:
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randint(0, 60, (8, 4, size), generator=generator).to(torch.uint8)
    rows = StoredRows(kind, blocks)
    here = affine(rows)
    there = affine(StoredRows(kind, blocks.cuda()))
    assert torch.equal(here.numbers, there.numbers.cpu())
    for own, other in ((here.scale, there.scale), (here.low, there.low)):
        assert torch.allclose(own, other.cpu(), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", sorted(ROUNDED))
@pytest.mark.parametrize("device", DEVICES)
def test_other_types_are_expanded_on_the_device(kind: str, device: str) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[quant]
    generator = torch.Generator().manual_seed(2)
    shape = (6, 512 // size, num_bytes)
    blocks = torch.randint(0, 60, shape, dtype=torch.uint8, generator=generator)
    expected = gguf.quants.dequantize(blocks.flatten(1).numpy(), quant)
    values = expanded(kind, blocks.to(device))
    torch.testing.assert_close(values.cpu(), torch.from_numpy(expected))
    if kind in WIDTHS:
        return  # kept
    layer = make_layer(6, 512, torch.bfloat16, device)
    layer.load_stored(StoredRows(kind, blocks), 0)
    layer.finalize()
    kept = layer.embed(torch.arange(6, device=device))
    twin = make_layer(6, 512, torch.bfloat16, device)
    twin.load_rows(values, 0)
    twin.finalize()
    assert torch.equal(kept, twin.embed(torch.arange(6, device=device)))


class Measured:
    """`Tuned`: some shapes; and what was asked for."""

    def __init__(self, found: dict[Shape, ByRows]) -> None:
        self.found = found
        self.asked: list[Shape] = []

    def get(self, n: int, k: int, weights: Weights = "half") -> ByRows | None:
        self.asked.append(Shape(n, k, weights))
        return self.found.get(Shape(n, k, weights))


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_what_was_measured_is_used(device: str, dtype: torch.dtype) -> None:
    """Each run of rows is a shape of its own. Where cuBLAS was faster, rows are widened."""
    of_four = {
        rows: SmallGemmConfig("mma", max(16, rows), 32, 2, 4, 2, splits=2) for rows in GROUP_BANDS
    }
    of_eight: ByRows = {rows: None if rows in (4, 64) else of_four[rows] for rows in GROUP_BANDS}
    tuned = Measured({Shape(96, 512, "int4"): of_four, Shape(64, 512, "int8"): of_eight})
    spec = LinearSpec(512, 160, dtype, torch.device(device), is_looked_up=True)
    layer = GroupLinears(tuned)(spec)
    assert isinstance(layer, GroupLinear)
    values = torch.randn(160, 512, generator=torch.Generator().manual_seed(6)) / 512**0.5
    layer.load_stored(gguf_rows(values[:96], "Q4_0"), 0)
    layer.load_stored(gguf_rows(values[96:], "Q8_0"), 96)
    layer.finalize()
    is_half = dtype.itemsize == 2
    assert tuned.asked == (layer.shapes() if is_half else []), "float32 was not measured"
    assert ([run.configs for run in layer._runs] == [of_four, of_eight]) == is_half
    check_products(layer, layer.embed(torch.arange(160, device=device)), dtype)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("columns", "is_one"), [(512, True), (5120, True), (512, False)])
def test_a_gate_opens_in_the_product_of_one_row(
    device: str, dtype: torch.dtype, columns: int, is_one: bool
) -> None:
    values = torch.randn(32, columns, generator=torch.Generator().manual_seed(8)) / columns**0.5
    build = Build(dtype, torch.device(device), GroupLinears(), TritonOps())
    layer = Linear(columns, {"gate_proj": 16, "up_proj": 16}, bias=True, build=build)
    assert layer.bias is not None and isinstance(layer.method, GroupLinear)
    layer.bias.data.copy_(torch.linspace(-1, 1, 32))
    layer.method.load_stored(gguf_rows(values[:16], "Q4_0"), 0)
    layer.method.load_stored(gguf_rows(values[16:], "Q4_0" if is_one else "Q8_0"), 16)
    layer.finalize()
    for rows in (1, 2):
        x = normal(rows, columns, dtype=dtype, device=device, seed=columns)
        fused = layer.method.multiply_gated(x, layer.bias, "silu")
        assert (fused is not None) == (is_one and rows == 1 and dtype.itemsize == 2)
        found = layer.gated(x, "silu", build.ops)
        product = layer(x)
        assert_near(found, build.ops.gated_activation(product, "silu"), dtype)


def test_widths_go_by_tiles_of_rows() -> None:
    numbers = torch.full((5 * TILE + 3, 32), 34, dtype=torch.uint8)
    assert widths(numbers) == [(0, 5 * TILE + 3, 4)]
    numbers[TILE + 1, 7] = 35
    expected = [(0, TILE, 4), (TILE, 2 * TILE, 8), (2 * TILE, 5 * TILE + 3, 4)]
    assert widths(numbers) == expected
    numbers[3 * TILE, 0] = 1
    assert widths(numbers) == [(0, 5 * TILE + 3, 8)]  # too many runs


def test_a_row_that_is_not_finite_shows() -> None:
    layer = make_layer(4, 64, torch.bfloat16, "cpu")
    rows = torch.ones(4, 64)
    rows[2, 5] = float("nan")
    layer.load_rows(rows, 0)
    layer.finalize()
    assert layer.row_scale.isfinite().tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_band_has_a_configuration_that_fits_small_gpus(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(int8_groups, "shared_bytes", lambda device: 99 * 1024)
    for n, k in [(28672, 4096), (4096, 14336), (576, 1536), (33, 100)]:
        spec = LinearSpec(k, n, dtype, torch.device("cpu"), is_looked_up=True)
        for num_bits in (4, 8):
            for band in GROUP_BANDS:
                config = choose(band, n, k, num_bits, spec)
                assert config.block_m >= band
                is_few = band == 1 or (band == 2 and num_bits == 4)
                assert (config.kind == "gemv") == (is_few and dtype == torch.bfloat16)
                if config.kind == "gemv":
                    assert config.block_n % 4 == 0
                    continue
                columns = config.block_k * 32
                of_x = dtype.itemsize * config.block_m * columns
                of_w = config.block_n * (columns * num_bits // 8 + 4 * config.block_k)
                assert 1 <= config.num_stages and config.num_stages * (of_x + of_w) <= 97 * 1024
                assert config.splits == 1 or 2 * config.splits * config.block_k <= -(-k // 32)
