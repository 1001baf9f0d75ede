"""Files of 8-bit floats that stay so: their numbers and scales, fused, multiplied and refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel, Row, load
from quantized_weights import Write, fp8_blocks, fp8_whole, quantize_folder, scaled
from safetensors.torch import load_file, save_file
from triton_device import DEVICES_AND_DTYPES, IS_CUDA, normal, require_triton

from termgen.config import EngineConfig
from termgen.engine.device import kernels
from termgen.engine.device.layers.linear import LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.loader import kept_form, load_model_config, open_checkpoint
from termgen.engine.device.models import registry
from termgen.engine.device.quantization.stored_matrices import (
    FLOAT8_BLOCKS,
    FLOAT8_ROWS,
    ScaledNumbers,
)
from termgen.engine.device.runner.resolve import resolve_quantization
from termgen.errors import CorruptFileError

require_triton()

from termgen.engine.device.kernels.gemm.small_gemm_config import (  # noqa: E402
    ROW_BANDS,
    ByRows,
    Shape,
    SmallGemmConfig,
    Weights,
)
from termgen.engine.device.quantization import float8  # noqa: E402
from termgen.engine.device.quantization.float8 import Float8Linear, Float8Linears  # noqa: E402

TinyModelDir = Callable[..., Path]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
FBGEMM = {"quant_method": "fbgemm_fp8"}
FORMATS: dict[str, tuple[dict[str, Any], Write]] = {
    "blocks": (BLOCKS, fp8_blocks(128, 128)),
    "wide blocks": ({**BLOCKS, "weight_block_size": [16, 256]}, fp8_blocks(16, 256)),
    "rows": (FLOATS, scaled("float", strategy="channel")),
    "rows of fbgemm": (FBGEMM, scaled("float", strategy="channel")),
    "whole": (MODELOPT, fp8_whole),
    "whole, one number": (FLOATS, scaled("float", strategy="tensor")),
}
SIZES = {"hidden_size": 256, "intermediate_size": 272}
"""The second part of a fused matrix begins where no block of 128 rows does."""
ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half of a number's last place, for float32 what sums add."""
LAYER = "model.layers.1.mlp.down_proj"

Part = tuple[tuple[int, int] | None, int]
"""Rows and columns of a block, or None for floats; and rows."""
FUSED: dict[str, list[Part]] = {
    "one block": [((128, 128), 256)],
    "aligned": [((128, 128), 144), ((128, 128), 48), ((128, 128), 48)],
    "misaligned": [((128, 128), 40), ((128, 128), 24), ((64, 256), 70)],
    "scales of parts": [((1, 384), 40), ((33, 384), 33)],
    "mixed": [((128, 128), 40), ((1, 384), 33), (None, 20), ((128, 128), 7)],
    "mixed, floats first": [(None, 5), ((16, 128), 64), ((16, 128), 3)],
}


def fused(
    parts: list[Part], columns: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Float8Linear, torch.Tensor]:
    """A layer filled in some order, and its numbers in float64; floats among them are such as
    rounding keeps."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(rows for _, rows in parts)
    spec = LinearSpec(columns, num_rows, dtype, torch.device(device), is_looked_up=True)
    layer = Float8Linears()(spec)
    assert isinstance(layer, Float8Linear)
    loads, values, first = [], [], 0
    for block, rows in parts:
        numbers = torch.randn(rows, columns, generator=generator).mul_(60).to(torch.float8_e4m3fn)
        if block is None:
            values.append(numbers.double() / 1024)
            loads.append((lambda v, f: layer.load_rows(v.to(dtype), f), values[-1], first))
        else:
            grid = (-(-rows // block[0]), -(-columns // block[1]))
            scale = torch.rand(grid, generator=generator).add_(0.3).div_(1000)
            matrix = ScaledNumbers((rows, columns), block)
            tensors = {"weight": numbers, "scale": scale}
            values.append(matrix.rows(tensors, 0, rows).double())
            stored = matrix.float8(tensors, 0, rows)
            loads.append((layer.load_stored, stored, first))
        first += rows
    random.Random(seed).shuffle(loads)
    for load_part, what, row in loads:
        load_part(what, row)
    layer.finalize()
    return layer, torch.cat(values).to(device)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("seed", range(2))
def test_products_are_those_of_the_stored_numbers(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, name: str, seed: int
) -> None:
    """An error is one of rounding in the type of x, whatever the scales: more than that only where
    the weight was widened in it."""
    print("seed", seed)
    monkeypatch.setattr(float8, "_PART_NUMBERS", 33 * 384)
    columns = 384 if "scales" in name or "mixed" in name else 300
    layer, weight = fused(FUSED[name], columns, dtype, device, seed)
    for count in (0, 1, 2, 4, 16, 64, 65) + ((300,) if IS_CUDA else ()):
        x = normal(count, columns, dtype=dtype, device=device, seed=count)
        found = layer.multiply(x, None).double()
        expected = x.double() @ weight.T
        room = x.double().abs() @ weight.abs().T * ROUNDING[dtype] * (1 if count < 65 else 2)
        smallest = torch.finfo(dtype).smallest_normal
        assert ((found - expected).abs() <= room + smallest).all(), count
    ids = torch.tensor([5, 0, len(weight) - 1], device=device)
    torch.testing.assert_close(
        layer.embed(ids).double(), weight[ids], rtol=2 * ROUNDING[dtype], atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (1, 0), (0, 0)], ids=["blocks", "rows", "whole"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_products_of_large_matrices_on_a_gpu(
    block: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    rows, columns = rng.randrange(1000, 9000), rng.randrange(500, 9000)
    own = (block[0] or rows, block[1] or columns)
    layer, weight = fused([(own, rows), (own, rows // 3)], columns, dtype, "cuda", seed)
    for count in (1, 4, 16, 64, 300):
        x = normal(count, columns, dtype=dtype, device="cuda", seed=count)
        found, expected = layer.multiply(x, None).double(), x.double() @ weight.T
        error = (found - expected).norm() / expected.norm()
        assert error < ROUNDING[dtype] * (1 if count <= 64 else 2), (count, error)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("name", ["one block", "scales of parts"])
def test_what_was_measured_is_used(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, name: str
) -> None:
    """The shape says which scales a weight has. Where cuBLAS was faster, it is widened."""
    weights = "fp8-blocks" if name == "one block" else "fp8"
    found: ByRows = {
        rows: None
        if rows in (4, 64)
        else SmallGemmConfig("mma", max(16, rows), 32, 64, 4, 2, splits=2)
        for rows in ROW_BANDS
    }
    asked = []

    class Measured:
        def get(self, n: int, k: int, weights: Weights = "half") -> ByRows | None:
            asked.append(Shape(n, k, weights))
            return found

    monkeypatch.setattr(
        "test_float8_stored.Float8Linears", functools.partial(Float8Linears, Measured())
    )
    columns = 384
    layer, weight = fused(FUSED[name], columns, dtype, device, seed=1)
    is_half = dtype.itemsize == 2
    shape = Shape(len(weight), columns, weights)  # type: ignore[arg-type]
    assert layer.shapes() == [shape]
    assert asked == ([shape] if is_half else []), "float32 was not measured"
    assert (layer._configs == found) == is_half
    for count in (1, 4, 16, 64):
        x = normal(count, columns, dtype=dtype, device=device, seed=count)
        room = x.double().abs() @ weight.abs().T * ROUNDING[dtype] * 2
        error = (layer.multiply(x, None).double() - x.double() @ weight.T).abs()
        assert (error <= room + torch.finfo(dtype).smallest_normal).all(), count


@pytest.fixture
def stored(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    def make(name: str) -> tuple[Path, Path]:
        config, write = FORMATS[name]
        return quantize_folder(tiny_model_dir("llama", **SIZES), tmp_path / "m", config, write)

    return make


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_of_them_computes_as_its_twin(
    name: str, stored: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "why_unusable", lambda *_, **__: "")
    folder, twin = stored(name)
    checkpoint = open_checkpoint(folder)
    kind = checkpoint.kind(f"{LAYER}.weight")  # type: ignore[attr-defined]
    assert kind == (FLOAT8_BLOCKS if "blocks" in name else FLOAT8_ROWS)
    checkpoint.close()
    tokens = list(range(5, 25))
    found = PagedModel(load(folder, quantization="fp8")).step([Row(0, 0, tokens)])[0]
    expected = PagedModel(load(twin)).step([Row(0, 0, tokens)])[0]
    # Logits reach 11; sums in another order change their last places, a second rounding far more.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("end", ["weight", "weight_scale_inv"])
def test_what_is_no_number_is_named(
    end: str, stored: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "why_unusable", lambda *_, **__: "")
    folder = stored("blocks")[0]
    weights = load_file(folder / "model.safetensors")
    name = f"{LAYER}.{end}"
    wrong = weights[name].float()
    wrong[-1, -1] = float("nan")
    weights[name] = wrong.to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match=f"tensor {name} has NaN or infinite values"):
        load(folder, quantization="fp8")


def test_folders_of_them_stay_so_on_a_gpu(
    stored: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, twin = stored("blocks")
    monkeypatch.setattr(kernels, "why_unusable", lambda device, dtype=None: "")
    cuda, model = torch.device("cuda:0"), load_model_config(folder)

    def resolved(path: Path, **options: Any) -> str | None:
        return resolve_quantization(EngineConfig(model=str(path), **options), model, cuda, path)

    assert resolved(folder) == "fp8"
    assert resolved(twin) is None
    assert resolved(folder, quantization="none") is None
    assert resolved(folder, dtype="bfloat16") is None
    assert resolved(folder, quantization="int8") == "int8"
    monkeypatch.setattr(kernels, "why_unusable", lambda device, dtype=None: "old" if dtype else "")
    assert resolved(folder) is None


def test_a_folder_of_the_other_type_becomes_16_bits(
    stored: Callable[[str], tuple[Path, Path]],
) -> None:
    """No kernel has numbers of 5 bits of exponent."""
    folder = stored("blocks")[0]
    assert kept_form(folder) == "fp8"
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.dtype == torch.float8_e4m3fn:
            weights[name] = weight.float().to(torch.float8_e5m2)
    save_file(weights, folder / "model.safetensors")
    assert kept_form(folder) is None


@pytest.mark.parametrize(
    ("shape", "block", "kind"),
    [
        ((300, 300), (128, 128), FLOAT8_BLOCKS),
        ((300, 300), (16, 256), FLOAT8_BLOCKS),
        ((40, 300), (40, 128), FLOAT8_BLOCKS),
        ((300, 100), (128, 128), FLOAT8_ROWS),
        ((300, 300), (1, 300), FLOAT8_ROWS),
        ((300, 300), (48, 128), FLOAT8_BLOCKS),
        ((300, 300), (128, 96), None),
        ((300, 300), (24, 128), None),
        ((300, 300), (1, 128), None),
    ],
)
def test_blocks_that_the_kernels_take(
    shape: tuple[int, int], block: tuple[int, int], kind: str | None
) -> None:
    assert ScaledNumbers(shape, block).float8_kind == kind


@pytest.mark.parametrize("rows", [16, 24])
def test_rows_in_another_order_keep_their_scales(rows: int) -> None:
    """Rows of two matrices take turns in a file."""
    generator = torch.Generator().manual_seed(rows)
    num_rows, columns = 8 * rows, 256
    tensors = {
        "weight": torch.randn(num_rows, columns, generator=generator).to(torch.float8_e4m3fn),
        "scale": torch.rand(-(-num_rows // 16), 2, generator=generator),
    }
    matrix = ScaledNumbers((num_rows, columns), (16, 128))
    spec = LinearSpec(columns, num_rows, torch.float32, torch.device("cpu"), is_looked_up=True)
    layer = Float8Linears()(spec)
    order = torch.arange(num_rows).view(-1, 2, rows).transpose(0, 1).flip(0).flatten()
    stored = matrix.float8(tensors, 0, num_rows)
    for first in range(0, num_rows, rows):
        own = stored.blocks[order[first : first + rows]]
        layer.load_stored(StoredRows(stored.kind, own), first)
    layer.finalize()
    expected = matrix.rows(tensors, 0, num_rows)[order]
    assert torch.equal(layer.embed(torch.arange(num_rows)), expected)
