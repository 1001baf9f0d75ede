"""The gated product in one kernel against the product and the activation in two."""

from __future__ import annotations

import pytest
import torch
from triton_device import (
    DEVICES,
    DEVICES_AND_DTYPES,
    assert_near,
    normal,
    poison,
    require_triton,
)

require_triton()

from termgen.engine.kernels.gate_up_silu import gate_up_silu, gate_up_silu_reference  # noqa: E402
from termgen.engine.kernels.silu_mul import silu_mul  # noqa: E402
from termgen.engine.kernels.small_gemm import small_gemm  # noqa: E402
from termgen.engine.kernels.small_gemm_config import SmallGemmConfig  # noqa: E402

CONFIGS = {
    "gemv1": SmallGemmConfig("gemv", 1, 4, 256, 1, prefetch_bytes=2048),
    "gemv2": SmallGemmConfig("gemv", 2, 8, 512, 2, num_stages=3),
    "gemv4": SmallGemmConfig("gemv", 4, 2, 256, 1),
    "mma16": SmallGemmConfig("mma", 16, 64, 64, 4, num_stages=3),
    "mma32": SmallGemmConfig("mma", 32, 16, 128, 2, num_stages=3),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@configs
@pytest.mark.parametrize(("size", "k"), [(1, 16), (64, 512), (70, 336), (33, 100)])
def test_gate_up_silu(
    device: str, dtype: torch.dtype, config: SmallGemmConfig, size: int, k: int
) -> None:
    rows = max(1, config.block_m - 1)
    x = normal(rows, k + 16, dtype=dtype, device=device, seed=k)[:, :k]
    weight = normal(2 * size, k, dtype=dtype, device=device, seed=size, scale=k**-0.5)
    out = poison(rows, size, dtype=dtype, device=device)
    assert gate_up_silu(x, weight, config=config, out=out) is out
    assert_near(out, gate_up_silu_reference(x.double(), weight.double()), dtype)


@pytest.mark.parametrize("device", DEVICES)
@configs
def test_against_two_kernels_and_row_by_row(device: str, config: SmallGemmConfig) -> None:
    rows = config.block_m
    x = normal(rows, 336, dtype=torch.float16, device=device, seed=1)
    weight = normal(140, 336, dtype=torch.float16, device=device, seed=2, scale=0.1)
    fused = gate_up_silu(x, weight, config=config)
    assert_near(fused, silu_mul(small_gemm(x, weight, config=config)), torch.float16)
    for row in {0, rows // 2, rows - 1}:
        alone = gate_up_silu(x[row : row + 1], weight, config=config)
        assert torch.equal(alone[0], fused[row])


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str) -> None:
    x = torch.zeros(0, 64, device=device)
    assert gate_up_silu(x, torch.zeros(32, 64, device=device), config=CONFIGS["mma16"]).shape == (
        0,
        16,
    )
