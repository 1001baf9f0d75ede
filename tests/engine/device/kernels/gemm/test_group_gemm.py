"""Products of a few rows with weights of 4- and 8-bit groups: every number, every edge."""

from __future__ import annotations

from typing import Any

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
from termgen.engine.device.kernels.gemm.group_config import group_cut, stage_bytes  # noqa: E402
from termgen.engine.device.kernels.gemm.group_gemm import (  # noqa: E402
    group_gemm,
    group_gemm_reference,
    widen,
)
from termgen.engine.device.kernels.gemm.group_layout import (  # noqa: E402
    COARSE,
    GROUP,
    pack,
    pack_pairs,
    rows_aside,
)
from termgen.engine.device.kernels.gemm.small_gemm import SmallGemmWorkspace  # noqa: E402
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig  # noqa: E402
from termgen.engine.device.kernels.rows.gated_activation import gated_activation  # noqa: E402
from termgen.engine.device.native.int8_blocks import Quantized, dequantize  # noqa: E402

CONFIGS = {
    "gemv1": SmallGemmConfig("gemv", 1, 4, 64, 2),
    "gemv2": SmallGemmConfig("gemv", 2, 8, 16, 1),
    "walk1": SmallGemmConfig("gemv", 1, 4, 32, 1, resident=1),
    "walk2": SmallGemmConfig("gemv", 2, 8, 16, 1, resident=2),
    "16": SmallGemmConfig("mma", 16, 64, 4, 4, num_stages=3),
    "16-cut2": SmallGemmConfig("mma", 16, 32, 8, 4, num_stages=3, splits=2),
    "32-cut4": SmallGemmConfig("mma", 32, 64, 2, 4, num_stages=2, splits=4),
    "64": SmallGemmConfig("mma", 64, 128, 4, 8, num_stages=2),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
bits = pytest.mark.parametrize("num_bits", [4, 8])
Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_rows(n: int, k: int, num_bits: int) -> Quantized:
    """All numbers of a width; zeros where x has no column."""
    generator = torch.Generator().manual_seed(n + k)
    width = -(-k // GROUP.value) * GROUP.value
    levels, step = (16, COARSE.value) if num_bits == 4 else (256, 1)
    numbers = (torch.randint(0, levels, (n, width), generator=generator) * step).to(torch.uint8)
    groups = (n, width // GROUP.value)
    scale = torch.rand(groups, generator=generator).add_(0.25).div_(128).half()
    low = torch.rand(groups, generator=generator).neg_().half()
    row_scale = torch.exp2(torch.arange(n) % 5 - 8.0)
    return Quantized(numbers, scale, low, row_scale)


def weight_of(rows: Quantized, num_bits: int, device: str) -> Weight:
    words, pairs = pack(rows.numbers, num_bits), pack_pairs(rows.scale, rows.low, num_bits)
    return words.to(device), pairs.to(device), rows.row_scale.to(device)


def workspace_of(config: SmallGemmConfig, n: int, device: str) -> SmallGemmWorkspace:
    workspace = SmallGemmWorkspace(
        torch.device(device), num_values=config.partial_values(n), num_tiles=config.tiles(n)
    )
    workspace.partial.fill_(float("nan"))
    return workspace


@bits
def test_scales_of_a_group_lie_side_by_side(num_bits: int) -> None:
    aside = rows_aside(num_bits)
    scale = torch.arange(2.0 * (aside + 1)).view(aside + 1, 2).half()
    halves = pack_pairs(scale, -scale, num_bits).view(torch.float16)
    assert halves.shape == (2, 2, 2 * aside)
    assert halves[0, 1, :6].tolist() == [1, -1, 3, -3, 5, -5]
    assert halves[1, 0, :3].tolist() == [2 * aside, -2 * aside, 0]


def test_an_element_has_numbers_of_one_group() -> None:
    numbers = torch.arange(64, dtype=torch.uint8).expand(2, 64).contiguous()
    first = pack(numbers, 8).view(torch.uint8)[0].tolist()
    assert first[:6] == [0, 16, 1, 17, 2, 18] and first[32:36] == [32, 48, 33, 49]
    coarse = (torch.arange(64) // 8 * 17).to(torch.uint8).expand(2, 64).contiguous()
    assert pack(coarse, 4)[1].tolist() == [0x32103210] * 4 + [0x76547654] * 4


@pytest.mark.parametrize("device", DEVICES)
@bits
@pytest.mark.parametrize(("n", "k"), [(33, 100), (16, 512), (70, 420)])
def test_widening_rounds_once(device: str, num_bits: int, n: int, k: int) -> None:
    rows = random_rows(n, k, num_bits)
    words, pairs, row_scale = weight_of(rows, num_bits, device)
    expected = dequantize(rows)[:, :k]
    weight, every = (words, pairs, row_scale, k), slice(0, n)
    wide = widen(*weight, torch.float32, num_bits, every).cpu()
    # The multiplication and the addition may be one operation.
    assert ((wide - expected).abs() <= 2**-23 * 4 * row_scale.cpu()[:, None]).all()
    for dtype in (torch.float16, torch.bfloat16):
        half = widen(*weight, dtype, num_bits, every).cpu()
        if device == "cuda" or dtype == torch.float16:  # the interpreter cuts bfloat16 off
            assert torch.equal(half, wide.to(dtype))
    for some in (slice(7, 12), slice(5, 5), torch.tensor([3, 0, n - 1]), torch.tensor([]).long()):
        own = some.to(device) if isinstance(some, torch.Tensor) else some
        assert torch.equal(widen(*weight, torch.bfloat16, num_bits, own).cpu(), half[some])


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@configs
@bits
@pytest.mark.parametrize(("n", "k"), [(128, 512), (70, 420), (33, 100)])
def test_products_are_those_of_the_weight(
    device: str, dtype: torch.dtype, config: SmallGemmConfig, num_bits: int, n: int, k: int
) -> None:
    if config.kind == "gemv" and dtype == torch.float32:
        pytest.skip("gemv rounds x to 16 bits, which has a test of its own")
    words, pairs, row_scale = weight_of(random_rows(n, k, num_bits), num_bits, device)
    rounded = widen(words, pairs, row_scale, k, dtype, num_bits, slice(0, n)).double()
    for rows in {config.block_m, max(1, config.block_m - 3)}:
        x = normal(rows, k + 16, dtype=dtype, device=device, seed=k)[:, :k]
        for bias in (None, normal(n, dtype=dtype, device=device, seed=n)):
            wide = poison(rows, n + 8, dtype=dtype, device=device)
            out, workspace = wide[:, 3 : 3 + n], workspace_of(config, n, device)
            group_gemm(
                *(x, words, pairs, row_scale, bias),
                num_bits=num_bits,
                config=config,
                workspace=workspace,
                out=out,
            )
            assert not workspace.arrivals.any(), "the next launch would find arrivals"
            assert wide[:, :3].isnan().all() and wide[:, 3 + n :].isnan().all()
            expected = x.double() @ rounded.T + (0 if bias is None else bias.double())
            if config.kind == "gemv":  # the weight is not rounded
                whole = dequantize(random_rows(n, k, num_bits))[:, :k].to(device).double()
                expected = x.double() @ whole.T + (0 if bias is None else bias.double())
            assert_near(out, expected, dtype)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("config", ["gemv2", "walk2"])
@bits
@pytest.mark.parametrize(("n", "k", "activation"), [(24, 160, "silu"), (16, 100, "gelu_tanh")])
def test_a_gate_opens_in_the_same_launch(
    device: str, dtype: torch.dtype, config: str, num_bits: int, n: int, k: int, activation: str
) -> None:
    weight = weight_of(random_rows(n, k, num_bits), num_bits, device)
    bias = normal(n, dtype=dtype, device=device, seed=n) if activation == "silu" else None
    for rows in (1, 2):
        given = (normal(rows, k, dtype=dtype, device=device, seed=k), *weight, bias)
        product = group_gemm(*given, num_bits=num_bits, config=CONFIGS[config])
        out = poison(rows, n // 2, dtype=dtype, device=device)
        options: dict[str, Any] = {"num_bits": num_bits, "config": CONFIGS[config], "out": out}
        assert group_gemm(*given, activation=activation, **options) is out
        assert torch.equal(out, gated_activation(product, activation))


@pytest.mark.parametrize("device", DEVICES)
@bits
def test_the_reference_dequantises(device: str, num_bits: int) -> None:
    rows = random_rows(40, 300, num_bits)
    words, pairs, row_scale = weight_of(rows, num_bits, device)
    x = torch.eye(300, dtype=torch.float64, device=device)
    found = group_gemm_reference(x, words, pairs, row_scale.double(), num_bits=num_bits)
    expected = dequantize(rows)[:, :300].T.double()
    assert torch.allclose(found.cpu(), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@configs
@bits
def test_a_row_does_not_see_the_others(device: str, config: SmallGemmConfig, num_bits: int) -> None:
    weight = weight_of(random_rows(70, 512, num_bits), num_bits, device)
    whole = normal(config.block_m, 512, dtype=torch.float16, device=device, seed=1)

    def run(x: torch.Tensor) -> torch.Tensor:
        workspace = workspace_of(config, 70, device)
        return group_gemm(x, *weight, num_bits=num_bits, config=config, workspace=workspace)

    expected = run(whole)
    for row in {0, config.block_m // 2, config.block_m - 1}:
        assert torch.equal(run(whole[row : row + 1])[0], expected[row])
        others = torch.full_like(whole, float("nan"))
        others[row] = whole[row]
        assert torch.equal(run(others)[row], expected[row])


@pytest.mark.parametrize("device", DEVICES)
@bits
def test_integers_keep_all_of_x_but_its_last_bits(device: str, num_bits: int) -> None:
    """x whose groups differ by far, and whose numbers within a group do."""
    n, k = 24, 320
    rows = random_rows(n, k, num_bits)
    x = normal(1, k, dtype=torch.float32, device=device, seed=2)
    x *= torch.exp2(torch.arange(k, device=device) // 32 % 7 * 4.0 - 12)
    x[0, 40:60] *= 2**-6
    x[0, 96:128] = 0
    out = group_gemm(
        x, *weight_of(rows, num_bits, device), num_bits=num_bits, config=CONFIGS["gemv1"]
    )
    weight = dequantize(rows)[:, :k].to(device).double()
    largest = x.abs().view(-1, 32).amax(1).repeat_interleave(32).double()
    bound = (weight.abs() * largest).sum(1) * 2**-16
    error = (out.double() - x.double() @ weight.T)[0].abs()
    assert (error <= bound + 1e-5 * (weight.abs() @ x.double().abs().T)[:, 0]).all()
    assert not torch.equal(out, (x.double() @ weight.T).float()), "x was not rounded"


@pytest.mark.parametrize("device", DEVICES)
@bits
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(device: str, num_bits: int, value: float) -> None:
    weight = weight_of(random_rows(24, 320, num_bits), num_bits, device)
    x = normal(2, 320, dtype=torch.bfloat16, device=device, seed=3)
    x[1, 77] = value
    out = group_gemm(x, *weight, num_bits=num_bits, config=CONFIGS["gemv2"])
    assert out[0].isfinite().all() and not out[1].isfinite().any()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (28672, 4096), (576, 1536), (33, 100)])
@bits
def test_candidates_can_run(
    capability: tuple[int, int], shared_kib: int, n: int, k: int, num_bits: int
) -> None:
    """What is used without a measurement is among them; all fit in a program's shared memory."""
    gpu = Gpu("made up", capability, 132, 50 << 20, shared_kib * 1024)
    by_rows = candidates_by_rows(n, k, gpu, "int8" if num_bits == 8 else "int4")
    assert list(by_rows) == [1, 2, 4, 8, 16, 32, 64, 128]
    for rows, found in by_rows.items():
        usual = group_cut(rows, n, k, num_bits, item_bytes=2, shared_bytes=gpu.shared_bytes)
        assert found[0] == usual and 2 <= len(found) <= 20 and len(set(found)) == len(found)
        assert {config.kind for config in found} == ({"gemv", "mma"} if rows <= 2 else {"mma"})
        for config in found:
            assert config.block_m >= rows
            if config.kind == "gemv":
                assert config.block_n % 4 == 0 and config.splits == 1
                continue
            sizes = (config.block_m, config.block_n, config.block_k)
            of_stage = stage_bytes(*sizes, num_bits, item_bytes=2)
            assert of_stage * config.num_stages <= gpu.shared_bytes - 2048
            assert config.splits == 1 or 2 * config.splits * config.block_k <= -(-k // 32) + 31


@pytest.mark.parametrize("device", DEVICES)
@bits
@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_every_candidate_is_right(device: str, num_bits: int, rows: int) -> None:
    n, k = 70, 576
    gpu = Gpu("made up", (9, 0), 16, 50 << 20, 163 * 1024)
    tried = candidates_by_rows(n, k, gpu, "int8" if num_bits == 8 else "int4")[rows]
    quantized = random_rows(n, k, num_bits)
    weight = weight_of(quantized, num_bits, device)
    whole = dequantize(quantized)[:, :k].to(device).double()
    x = normal(rows, k, dtype=torch.float16, device=device, seed=rows)
    expected = x.double() @ whole.T
    for config in tried:
        workspace = workspace_of(config, n, device)
        out = group_gemm(x, *weight, num_bits=num_bits, config=config, workspace=workspace)
        assert_near(out, expected, torch.float16)
