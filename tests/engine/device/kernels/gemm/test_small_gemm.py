"""Products of a few rows: both kernels, every edge, split K, and independence of rows."""

from __future__ import annotations

import random

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

from termgen.engine.device.kernels.gemm.small_gemm import (  # noqa: E402
    SmallGemmWorkspace,
    small_gemm,
    small_gemm_reference,
)
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig  # noqa: E402

CONFIGS = {
    "gemv1": SmallGemmConfig("gemv", 1, 4, 256, 1, prefetch_bytes=2048),
    "gemv2": SmallGemmConfig("gemv", 2, 8, 512, 2, num_stages=3),
    "gemv4": SmallGemmConfig("gemv", 4, 2, 256, 1),
    "held8": SmallGemmConfig("held", 8, 16, 64, 4),
    "held16": SmallGemmConfig("held", 16, 32, 64, 2),
    "held32": SmallGemmConfig("held", 32, 16, 32, 8),
    "mma16": SmallGemmConfig("mma", 16, 64, 64, 4, num_stages=3),
    "mma16-thin": SmallGemmConfig("mma", 16, 16, 128, 2, num_stages=3),
    "mma16-cut2": SmallGemmConfig("mma", 16, 64, 64, 4, num_stages=3, splits=2),
    "mma32-cut3": SmallGemmConfig("mma", 32, 32, 64, 4, num_stages=2, splits=3),
    "mma64-cut8": SmallGemmConfig("mma", 64, 64, 32, 4, num_stages=4, splits=8),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)


def make_workspace(config: SmallGemmConfig, n: int, device: str) -> SmallGemmWorkspace:
    workspace = SmallGemmWorkspace(
        torch.device(device), num_values=config.partial_values(n), num_tiles=config.tiles(n)
    )
    workspace.partial.fill_(float("nan"))
    return workspace


class Case:
    """x [M, K], a slice of a wider tensor, times weight [N, K]."""

    def __init__(
        self, m: int, n: int, k: int, *, bias: bool, dtype: torch.dtype, device: str, seed: int = 0
    ) -> None:
        self.x = normal(m, k + 16, dtype=dtype, device=device, seed=seed)[:, :k]
        self.weight = normal(n, k, dtype=dtype, device=device, seed=seed + 1, scale=k**-0.5)
        self.bias = normal(n, dtype=dtype, device=device, seed=seed + 2) if bias else None

    def run(
        self, config: SmallGemmConfig, *, workspace: SmallGemmWorkspace | None = None
    ) -> torch.Tensor:
        n, device = self.weight.shape[0], str(self.x.device)
        if workspace is None:
            workspace = make_workspace(config, n, device)
        out = poison(self.x.shape[0], n, dtype=self.x.dtype, device=device)
        result = small_gemm(
            self.x, self.weight, self.bias, config=config, workspace=workspace, out=out
        )
        assert result is out
        assert not workspace.arrivals.any(), "the next launch would find arrivals"
        return out

    def check(self, config: SmallGemmConfig) -> None:
        bias = None if self.bias is None else self.bias.double()
        expected = small_gemm_reference(self.x.double(), self.weight.double(), bias)
        assert_near(self.run(config), expected, self.x.dtype)


@devices_and_dtypes
@configs
def test_whole_tiles(device: str, dtype: torch.dtype, config: SmallGemmConfig) -> None:
    Case(config.block_m, 128, 512, bias=False, dtype=dtype, device=device).check(config)


@devices_and_dtypes
@configs
@pytest.mark.parametrize(("n", "k"), [(1, 16), (70, 336), (33, 100)])
def test_edges(device: str, dtype: torch.dtype, config: SmallGemmConfig, n: int, k: int) -> None:
    """Rows, features and depth that do not fill a tile; a K shorter than a tile, or than its
    pieces."""
    rows = max(1, config.block_m - 3)
    Case(rows, n, k, bias=True, dtype=dtype, device=device, seed=n).check(config)


@devices_and_dtypes
@pytest.mark.parametrize("m", [1, 2, 3, 5, 13, 17, 31, 33, 63])
def test_numbers_of_rows(device: str, dtype: torch.dtype, m: int) -> None:
    config = next(c for c in CONFIGS.values() if c.block_m >= m and c.kind == "mma")
    Case(m, 72, 256, bias=True, dtype=dtype, device=device, seed=m).check(config)


@configs
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_see_the_others(device: str, config: SmallGemmConfig) -> None:
    """The result is the same bit by bit: alone, among others, and beside rows of NaN."""
    whole = Case(config.block_m, 70, 336, bias=True, dtype=torch.float16, device=device, seed=5)
    expected = whole.run(config)
    assert torch.equal(whole.run(config), expected)
    x = whole.x
    for row in {0, config.block_m // 2, config.block_m - 1}:
        whole.x = x[row : row + 1]
        assert torch.equal(whole.run(config)[0], expected[row])
        whole.x = torch.full_like(x, float("nan"))
        whole.x[row] = x[row]
        assert torch.equal(whole.run(config)[row], expected[row])


@pytest.mark.parametrize("device", DEVICES)
def test_one_workspace_serves_many(device: str) -> None:
    """Products of different shapes run one after the other; no leftover of an earlier one is
    added."""
    cut = [CONFIGS[name] for name in ("mma16-cut2", "mma64-cut8", "mma32-cut3")]
    workspace = SmallGemmWorkspace(
        torch.device(device),
        num_values=max(config.partial_values(200) for config in cut),
        num_tiles=max(config.tiles(200) for config in cut),
    )
    for n in (200, 40):
        for config in cut:
            case = Case(9, n, 320, bias=False, dtype=torch.float32, device=device, seed=n)
            expected = case.run(config)
            assert torch.equal(case.run(config, workspace=workspace), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str) -> None:
    case = Case(0, 64, 64, bias=True, dtype=torch.float32, device=device)
    assert case.run(CONFIGS["mma16"]).shape == (0, 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(device: str, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    config = rng.choice(list(CONFIGS.values()))
    m, n, k = rng.randint(1, config.block_m), rng.randint(1, 200), rng.randint(1, 700)
    case = Case(m, n, k, bias=rng.random() < 0.5, dtype=torch.float32, device=device, seed=seed * 7)
    case.check(config)


@pytest.mark.gpu
@configs
def test_full_size(config: SmallGemmConfig) -> None:
    case = Case(config.block_m, 4096, 2048, bias=False, dtype=torch.bfloat16, device="cuda")
    case.check(config)


@pytest.mark.gpu
def test_overlapping_launches_give_the_same_bits() -> None:
    """A chain in which each product reads its predecessor's output, overlapped and not."""
    config = SmallGemmConfig("mma", 16, 64, 128, 4, num_stages=4, splits=4)
    gemv = SmallGemmConfig("gemv", 1, 8, 1024, 4)
    weights = [
        normal(1024, 1024, dtype=torch.bfloat16, device="cuda", seed=i, scale=1 / 32)
        for i in range(8)
    ]
    workspace = make_workspace(config, 1024, "cuda")

    def chain(pdl: bool) -> torch.Tensor:
        x = normal(1, 1024, dtype=torch.bfloat16, device="cuda", seed=99)
        for step in range(64):
            chosen = config if step % 3 else gemv
            x = small_gemm(x, weights[step % 8], config=chosen, workspace=workspace, pdl=pdl)
        return x

    expected = chain(pdl=False)
    for _ in range(10):
        assert torch.equal(chain(pdl=True), expected)


@pytest.mark.gpu
def test_other_row_counts_compile_nothing() -> None:
    from termgen.engine.device.kernels.gemm import small_gemm as module

    kernels = (module._mma_kernel, module.gemv_kernel, module.held_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def run(m: int, name: str) -> None:
        case = Case(m, 128, 512, bias=False, dtype=torch.bfloat16, device="cuda")
        case.x = case.x.contiguous()
        case.check(CONFIGS[name])

    for name in ("mma16", "gemv4", "held8"):
        run(2, name)
    before = compiled()
    for m in (1, 3, 4):
        run(m, "gemv4")
    for m in (1, 3, 8, 15, 16):
        run(m, "mma16")
    assert compiled() == before
