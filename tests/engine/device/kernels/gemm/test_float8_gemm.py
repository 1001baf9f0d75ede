"""Products of a few rows with weights of 8-bit floats: both kernels, every number, every edge."""

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

from termgen.engine.device.kernels.gemm.candidates import Gpu, candidates_by_rows  # noqa: E402
from termgen.engine.device.kernels.gemm.float8_config import float8_cut  # noqa: E402
from termgen.engine.device.kernels.gemm.float8_gemm import (  # noqa: E402
    BLOCK_ROWS,
    FLOAT8,
    GROUP,
    RUN,
    float8_gemm,
    float8_gemm_reference,
    pack,
    unpack,
    widen,
)
from termgen.engine.device.kernels.gemm.small_gemm import SmallGemmWorkspace  # noqa: E402
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig  # noqa: E402

CONFIGS = {
    "gemv1": SmallGemmConfig("gemv", 1, 8, 256, 4, num_stages=3),
    "gemv4": SmallGemmConfig("gemv", 4, 4, 128, 2),
    "mma16": SmallGemmConfig("mma", 16, 64, 64, 4, num_stages=3),
    "mma16-cut2": SmallGemmConfig("mma", 16, 32, 64, 4, num_stages=3, splits=2),
    "mma32-cut4": SmallGemmConfig("mma", 32, 64, 64, 4, num_stages=2, splits=4),
    "mma64": SmallGemmConfig("mma", 64, 128, 64, 8, num_stages=2),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)


def random_words(n: int, k: int, device: str) -> torch.Tensor:
    """All values of the type that are numbers; zeros where x has no column."""
    bits = torch.randint(
        0, 256, (n, -(-k // GROUP) * GROUP), generator=torch.Generator().manual_seed(n + k)
    )
    bits[(bits & 127) == 127] = 0  # NaN
    bits[:, k:] = 0
    return pack(bits.to(torch.uint8).view(FLOAT8)).to(device)


def random_blocks(n: int, k: int, scale_rows: int, device: str) -> torch.Tensor:
    """Scales of blocks, no two alike and no powers of two; those past x's columns are numbers."""
    size = (-(-n // scale_rows), -(-k // GROUP) * 2)
    return torch.rand(size, generator=torch.Generator().manual_seed(n)).add_(0.3).to(device)


def workspace_of(config: SmallGemmConfig, n: int, device: str) -> SmallGemmWorkspace:
    workspace = SmallGemmWorkspace(
        torch.device(device), num_values=config.partial_values(n), num_tiles=config.tiles(n)
    )
    workspace.partial.fill_(float("nan"))
    return workspace


def test_packing_loses_nothing() -> None:
    words = random_words(3, 512, "cpu")
    assert torch.equal(pack(unpack(words)), words)
    numbers = torch.arange(256, dtype=torch.uint8).expand(2, 256).contiguous()
    first = pack(numbers.view(FLOAT8)).view(torch.uint8)[0, :8].tolist()
    assert first == [0, 64, 128, 192, 1, 65, 129, 193]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "k"), [(33, 100), (16, 512), (70, 1300)])
def test_widening_is_exact(device: str, n: int, k: int) -> None:
    words = random_words(n, k, device)
    scale = torch.exp2(torch.arange(n, device=device) % 40 - 30.0)
    expected = unpack(words)[:, :k].float() * scale[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(widen(words, scale, k, dtype).float(), expected)
    assert widen(words[:0], scale[:0], k, torch.bfloat16).shape == (0, k)


@devices_and_dtypes
@configs
@pytest.mark.parametrize(("n", "k"), [(128, 512), (70, 1300), (33, 100)])
def test_products_are_those_of_the_numbers(
    device: str, dtype: torch.dtype, config: SmallGemmConfig, n: int, k: int
) -> None:
    words = random_words(n, k, device)
    generator = torch.Generator().manual_seed(n)
    scale = torch.rand(n, generator=generator).add_(0.5).div_(100 * k**0.5).to(device)
    for rows in {config.block_m, max(1, config.block_m - 3)}:
        x = normal(rows, k + 16, dtype=dtype, device=device, seed=k)[:, :k]
        for bias in (None, normal(n, dtype=dtype, device=device, seed=n)):
            out = poison(rows, n, dtype=dtype, device=device)
            workspace = workspace_of(config, n, device)
            float8_gemm(x, words, scale, bias, config=config, workspace=workspace, out=out)
            assert not workspace.arrivals.any(), "the next launch would find arrivals"
            wide = None if bias is None else bias.double()
            expected = float8_gemm_reference(x.double(), words, scale.double(), wide)
            assert_near(out, expected, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_rows", [1, BLOCK_ROWS])
@pytest.mark.parametrize(("n", "k"), [(33, 100), (70, 1300)])
def test_widening_with_scales_of_blocks(device: str, scale_rows: int, n: int, k: int) -> None:
    words, blocks = random_words(n, k, device), random_blocks(n, k, scale_rows, device)
    scale = torch.exp2(torch.arange(n, device=device) % 5 - 2.0)
    identity = torch.eye(k, dtype=torch.float32, device=device)
    expected = float8_gemm_reference(identity, words, scale, blocks=blocks).T
    found = widen(words, scale, k, torch.float32, blocks)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@devices_and_dtypes
@configs
@pytest.mark.parametrize("scale_rows", [1, BLOCK_ROWS])
@pytest.mark.parametrize(("n", "k"), [(128, 512), (70, 1300)])
def test_products_with_scales_of_blocks(
    device: str, dtype: torch.dtype, config: SmallGemmConfig, scale_rows: int, n: int, k: int
) -> None:
    words, blocks = random_words(n, k, device), random_blocks(n, k, scale_rows, device)
    scale = torch.linspace(0.5, 1.5, n, device=device).div_(100 * k**0.5)
    x = normal(config.block_m, k + 16, dtype=dtype, device=device, seed=k)[:, :k]
    bias = normal(n, dtype=dtype, device=device, seed=n)
    workspace = workspace_of(config, n, device)
    out = float8_gemm(x, words, scale, bias, config=config, workspace=workspace, blocks=blocks)
    expected = float8_gemm_reference(x.double(), words, scale.double(), bias.double(), blocks)
    assert_near(out, expected, dtype)


@pytest.mark.parametrize("device", DEVICES)
@configs
def test_a_row_does_not_see_the_others(device: str, config: SmallGemmConfig) -> None:
    words, scale = random_words(70, 512, device), torch.full((70,), 0.001, device=device)
    whole = normal(config.block_m, 512, dtype=torch.float16, device=device, seed=1)

    def run(x: torch.Tensor) -> torch.Tensor:
        workspace = workspace_of(config, 70, device)
        return float8_gemm(x, words, scale, config=config, workspace=workspace)

    expected = run(whole)
    for row in {0, config.block_m // 2, config.block_m - 1}:
        assert torch.equal(run(whole[row : row + 1])[0], expected[row])
        others = torch.full_like(whole, float("nan"))
        others[row] = whole[row]
        assert torch.equal(run(others)[row], expected[row])


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (28672, 4096), (576, 1536), (33, 100)])
def test_candidates_can_run(shared_kib: int, n: int, k: int) -> None:
    """Each has a tile that the kernels take, and that the shared memory of the GPU holds."""
    gpu = Gpu("made up", (9, 0), 132, 50 << 20, shared_kib * 1024)
    by_rows = candidates_by_rows(n, k, gpu, "fp8")
    for rows, found in by_rows.items():
        assert found, rows
        assert len(set(found)) == len(found)
        usual = float8_cut(rows, n, k)
        tile = 4 * usual.block_k * (usual.block_n + 2 * usual.block_m)
        if usual.kind == "gemv" or tile * usual.num_stages <= gpu.shared_bytes:
            assert usual in found, "what is used without a measurement"
        for config in found:
            assert config.block_m >= rows
            if config.kind == "gemv":
                assert rows <= 4
                continue
            assert (config.kind, config.block_k) == ("mma", RUN.value)
            tile = 4 * config.block_k * (config.block_n + 2 * config.block_m)
            assert tile * config.num_stages <= gpu.shared_bytes
