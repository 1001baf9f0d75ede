"""Weights in 8-bit floats: rounding, products of every number of rows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from paged_model import build
from triton_device import DEVICES_AND_DTYPES, assert_near, normal, require_triton

from termgen.config import EngineConfig
from termgen.engine.device.layers.linear import LinearSpec
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.models import registry
from termgen.errors import ConfigError

require_triton()

from termgen.engine.device.kernels.gemm.float8_config import float8_cut  # noqa: E402
from termgen.engine.device.kernels.gemm.float8_gemm import RUN  # noqa: E402
from termgen.engine.device.kernels.gemm.float8_table import MEASURED  # noqa: E402
from termgen.engine.device.kernels.gemm.small_gemm_config import ROW_BANDS  # noqa: E402
from termgen.engine.device.quantization import float8  # noqa: E402
from termgen.engine.device.quantization.float8 import Float8Linear, Float8Linears  # noqa: E402
from termgen.engine.device.quantization.float8_rows import round_rows  # noqa: E402

TinyModelDir = Callable[..., Path]


def rows_of_all_sizes(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-4, 3, num_rows)[:, None]
    return torch.randn(num_rows, num_columns, generator=generator) * sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_keeps_four_bits_of_a_number(dtype: torch.dtype) -> None:
    rows = rows_of_all_sizes(64, 512).to(dtype)
    numbers, scale = round_rows(rows)
    kept = numbers.float() * scale[:, None]
    # Half of the last place of a normal number, or of the smallest one of the row.
    bound = (rows.float().abs() * 2**-4).maximum(scale[:, None] * 2**-10)
    assert ((kept - rows.float()).abs() <= bound).all()
    largest = numbers.float().abs().amax(1)
    assert ((largest > 208) & (largest <= 448)).all()  # 224 may round down
    assert torch.equal(torch.frexp(scale).mantissa, torch.full((64,), 0.5))  # a power of two
    assert torch.equal(kept.bfloat16().float(), kept)


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    rows = torch.ones(4, 8)
    rows[0] = 0
    rows[1, 3] = float("nan")
    rows[2, 3] = float("inf")
    numbers, scale = round_rows(rows)
    assert not numbers[0].float().any()
    assert scale[0] == 1
    assert scale.isfinite().tolist() == [True, False, False, True]


def make_layer(
    rows: torch.Tensor, dtype: torch.dtype, device: str
) -> tuple[Float8Linear, torch.Tensor]:
    """A layer whose rows came in two parts, the last ones first; and its numbers."""
    spec = LinearSpec(rows.shape[1], len(rows), dtype, torch.device(device), is_looked_up=True)
    layer = Float8Linears()(spec)
    assert isinstance(layer, Float8Linear)
    middle = len(rows) // 3
    layer.load_rows(rows[middle:].to(device), middle)
    layer.load_rows(rows[:middle], 0)
    layer.finalize()
    numbers, scale = round_rows(rows)
    return layer, (numbers.float() * scale[:, None]).to(device)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(96, 256), (70, 100)])
def test_products_are_those_of_the_rounded_matrix(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    num_columns: int,
) -> None:
    monkeypatch.setattr(float8, "_PART_NUMBERS", 33 * num_columns)  # more than one part
    layer, weight = make_layer(
        rows_of_all_sizes(num_rows, num_columns).clamp(-1, 1) / num_columns**0.5, dtype, device
    )
    bias = normal(num_rows, dtype=dtype, device=device, seed=1)
    for count in (0, 1, 2, 3, 16, 17, 64, 65, 130):
        x = normal(count, num_columns, dtype=dtype, device=device, seed=count)
        for own in (None, bias):
            expected = F.linear(x.double(), weight.double(), None if own is None else own.double())
            y = layer.multiply(x, own)
            assert y.dtype == dtype
            assert_near(y, expected, dtype)
    ids = torch.tensor([5, 0, num_rows - 1], device=device)
    assert torch.equal(layer.embed(ids), weight[ids].to(dtype))


def test_numbers_of_rows_in_one_band_share_a_configuration() -> None:
    """So that padding a recorded batch changes no bit of a row; every band has one."""
    for n, k in [*MEASURED, (576, 1536), (100, 100)]:
        for band in ROW_BANDS:
            for is_measured in (False, True):
                config = float8_cut(band, n, k, is_measured)
                assert config.block_m >= band
                assert config.kind == "gemv" or config.block_k == RUN.value


def test_what_cannot_run_is_refused_by_name(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="fp8 runs on a GPU only") as error:
        EngineConfig(model="m", quantization="fp8", device="cpu")
    assert error.value.param == "quantization"
    with pytest.raises(ConfigError, match="fp8 is for the models that") as error:
        EngineConfig(model="m", quantization="fp8", model_impl="transformers")
    assert error.value.param == "quantization"
    config = load_model_config(tiny_model_dir("llama"))
    with pytest.raises(ConfigError, match="fp8: Triton kernels need a CUDA device") as error:
        build(config, quantization="fp8")
    assert error.value.param == "quantization"


@pytest.mark.parametrize("tied", [False, True])
def test_layers_have_8_bits_and_tables_keep_theirs(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setattr(registry, "why_unusable", lambda *_, **__: "")
    config = load_model_config(tiny_model_dir("llama", tie_word_embeddings=tied))
    model = build(config, quantization="fp8", dtype=torch.bfloat16)
    types = {name: p.dtype for name, p in model.named_parameters() if p.ndim == 2}
    tables = {name for name in types if name.startswith(("embedding.", "head."))}
    assert len(tables) == (1 if tied else 2)
    for name, dtype in types.items():
        # Four numbers of 8 bits in a word.
        assert dtype == (torch.bfloat16 if name in tables else torch.int32), name
