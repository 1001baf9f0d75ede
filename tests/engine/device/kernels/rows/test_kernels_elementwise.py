"""RMSNorm, gated activation, and rotation with cache write."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICES, DEVICES_AND_DTYPES, assert_near, normal, poison, require_triton

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from termgen.engine.device.attention.base import kv_cache_view  # noqa: E402
from termgen.engine.device.attention.triton_paged import TritonPagedAttention  # noqa: E402
from termgen.engine.device.kernels.kv_cache import (  # noqa: E402
    INT4,
    INT8,
    SCALED,
    fill_with_nan,
    head_items,
    kv_store_reference,
    queries_for,
    read_slots,
    scales_of,
    spread,
)
from termgen.engine.device.kernels.rows.gated_activation import (  # noqa: E402
    ACTIVATIONS,
    activated_product,
    gated_activation,
    gated_activation_reference,
    sigmoid_gate,
    sigmoid_gate_reference,
)
from termgen.engine.device.kernels.rows.qk_rope_kv import (  # noqa: E402  # noqa: E402
    qk_rope_kv,
    qk_rope_kv_reference,
    rotation,
    rotation_reference,
    store_kv,
)
from termgen.engine.device.kernels.rows.rmsnorm import (  # noqa: E402
    add_rmsnorm,
    add_rmsnorm_reference,
    norm_add_norm,
    norm_add_norm_reference,
    rmsnorm,
    rmsnorm_reference,
)
from termgen.engine.device.kernels.rows.spread_heads import spread_rows  # noqa: E402
from termgen.engine.device.layers.ops import Rotation, TorchOps  # noqa: E402
from termgen.vocabulary.device.kv_cache_types import LayerScales  # noqa: E402

LARGEST_ERROR = {INT8: 0.51 / 127, INT4: 0.51 * 2 / 15}
"""Relative to the largest number of a head."""
devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)


@devices_and_dtypes
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (5, 576), (3, 1000), (2, 4096)])
def test_rmsnorm(device: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    x = normal(num_rows, size, dtype=dtype, device=device, seed=size, scale=3.0)
    weight = normal(size, dtype=dtype, device=device, seed=1)
    out = poison(num_rows, size, dtype=dtype, device=device)
    assert rmsnorm(x, weight, 1e-5, out=out) is out
    assert_near(out, rmsnorm_reference(x, weight, 1e-5), dtype)


@devices_and_dtypes
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (7, 576), (2, 2048)])
def test_add_rmsnorm(device: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    # x is a slice of a wider tensor, as a fused projection's output may be.
    x = normal(num_rows, size + 8, dtype=dtype, device=device, seed=2)[:, :size]
    residual = normal(num_rows, size, dtype=dtype, device=device, seed=3, scale=9.0)
    weight = normal(size, dtype=dtype, device=device, seed=4)
    expected_residual = residual.clone()
    expected = add_rmsnorm_reference(x, expected_residual, weight, 1e-6)
    assert_near(add_rmsnorm(x, residual, weight, 1e-6), expected, dtype)
    assert torch.equal(residual, expected_residual)


@devices_and_dtypes
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (7, 1152), (2, 2048)])
def test_norm_add_norm(device: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    x = normal(num_rows, size + 8, dtype=dtype, device=device, seed=2, scale=5.0)[:, :size]
    residual = normal(num_rows, size, dtype=dtype, device=device, seed=3, scale=3.0)
    # Beside a half type, weights of float32.
    first, second = (normal(size, dtype=torch.float32, device=device, seed=s) for s in (4, 5))
    expected_residual = residual.clone()
    expected = norm_add_norm_reference(x, expected_residual, first, second, 0.3, 1e-6)
    out = poison(num_rows, size, dtype=dtype, device=device)
    assert norm_add_norm(x, residual, first, second, 0.3, 1e-6, out=out) is out
    assert_near(out, expected, dtype)
    assert_near(residual, expected_residual, dtype)
    for scale in (0.7, 1.0):
        expected_residual.copy_(residual)
        expected = norm_add_norm_reference(x, expected_residual, first, second, 0.3, 1e-6, scale)
        assert_near(norm_add_norm(x, residual, first, second, 0.3, 1e-6, scale), expected, dtype)
        assert_near(residual, expected_residual, dtype)


@devices_and_dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activated_product(device: str, dtype: torch.dtype, activation: str) -> None:
    gate = normal(3, 96, dtype=dtype, device=device, seed=4, scale=4.0)
    up = normal(3, 5, 96, dtype=dtype, device=device, seed=5)[:, 2]  # one layer's of several
    expected = gated_activation_reference(torch.cat((gate, up), 1), activation=activation)
    assert_near(activated_product(gate, up, activation), expected, dtype)
    assert_near(activated_product(gate[:1], up[:1], activation), expected[:1], dtype)


@devices_and_dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(device: str, dtype: torch.dtype, activation: str) -> None:
    for num_rows, size in ((1, 96), (3, 1536), (2, 1100)):
        gate_up = normal(num_rows, 2 * size, dtype=dtype, device=device, seed=size, scale=4.0)
        out = poison(num_rows, size, dtype=dtype, device=device)
        gated_activation(gate_up, activation=activation, out=out)
        assert_near(out, gated_activation_reference(gate_up, activation=activation), dtype)


@devices_and_dtypes
def test_sigmoid_gate(device: str, dtype: torch.dtype) -> None:
    for num_rows, size in ((1, 96), (3, 1536), (2, 1100)):
        x = normal(num_rows, size, dtype=dtype, device=device, seed=size)
        gate = normal(num_rows, size, dtype=dtype, device=device, seed=1, scale=4.0)
        gate[0, :4] = torch.tensor([-200.0, -60.0, 60.0, 200.0])
        expected = sigmoid_gate_reference(x, gate)
        assert sigmoid_gate(x, gate) is gate
        assert_near(gate, expected, dtype)


@devices_and_dtypes
def test_silu_far_from_zero(device: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-200.0, -60.0, -1.0, 0.0, 1.0, 60.0, 200.0, 5.0]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), -1).to(device, dtype)
    assert_near(gated_activation(gate_up), gated_activation_reference(gate_up), dtype)


def make_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: str,
    heads_first: bool,
) -> torch.Tensor:
    """A poisoned cache in the kernels' view, in either layout."""
    if not heads_first:
        shape = (num_blocks, block_size, 2, num_kv_heads, head_dim)
        return poison(*shape, dtype=dtype, device=device)
    shape = (num_blocks, num_kv_heads, 2, block_size, head_dim)
    return poison(*shape, dtype=dtype, device=device).permute(0, 3, 2, 1, 4)


def make_rotation(positions: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1e4 ** (-torch.arange(0, rotary_dim, 2, device=positions.device) / rotary_dim)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


@devices_and_dtypes
@pytest.mark.parametrize("norm_dtype", [None, "model", torch.float32])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(2, 1, 64, 64), (5, 5, 80, 80), (9, 3, 96, 24), (8, 1, 128, 128), (3, 1, 256, 64)],
)
def test_qk_rope_kv(
    device: str,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | str | None,
    in_place: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
) -> None:
    heads = num_heads + 2 * num_kv_heads
    qkv = normal(4, heads * head_dim, dtype=dtype, device=device, seed=head_dim)
    weight = None
    if norm_dtype is not None:
        kept = norm_dtype if isinstance(norm_dtype, torch.dtype) else dtype
        weight = normal(heads - num_kv_heads, head_dim, dtype=kept, device=device, seed=8)
    cos, sin = make_rotation(torch.tensor([0, 3, 1000, 31000], device=device), rotary_dim)
    slots = torch.tensor([11, 0, 5, 14], device=device)
    caches = [
        make_cache(4, 4, num_kv_heads, head_dim, dtype=dtype, device=device, heads_first=in_place)
        for _ in range(2)
    ]
    expected = qk_rope_kv_reference(
        qkv, caches[1], cos, sin, slots, num_heads=num_heads, norm_weight=weight, eps=1e-6
    )
    q = qkv.view(4, heads, head_dim)[:, :num_heads]
    if not in_place:
        q = poison(4, num_heads, head_dim, dtype=dtype, device=device)
    qk_rope_kv(
        qkv, caches[0], cos, sin, slots, num_heads=num_heads, norm_weight=weight, eps=1e-6, q=q
    )
    assert_near(q, expected, dtype)
    written = ~caches[1].isnan()
    assert torch.equal(written, ~caches[0].isnan())
    assert_near(caches[0][written], caches[1][written], dtype)


@devices_and_dtypes
@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("given", ["qkv", "qk", "q"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 24)])
def test_values_are_normalised_or_keys_or_another_layers(
    device: str, dtype: torch.dtype, in_float32: bool, given: str, head_dim: int, rotary_dim: int
) -> None:
    num_heads, num_kv_heads = 6, 2
    heads = num_heads + {"qkv": 2, "qk": 1, "q": 0}[given] * num_kv_heads
    qkv = normal(4, heads * head_dim, dtype=dtype, device=device, seed=head_dim)
    normed = num_heads + (2 * num_kv_heads if given != "q" else 0)
    kept = torch.float32 if in_float32 else dtype
    weight = normal(normed, head_dim, dtype=kept, device=device, seed=8)
    cos, sin = make_rotation(torch.tensor([0, 3, 1000, 31000], device=device), rotary_dim)
    slots = torch.tensor([11, 0, 5, 14], device=device)
    caches = [
        make_cache(4, 4, num_kv_heads, head_dim, dtype=dtype, device=device, heads_first=True)
        for _ in range(3)
    ]
    options = {"num_heads": num_heads, "norm_weight": weight, "eps": 1e-6}
    q = qk_rope_kv(qkv, caches[0], cos, sin, slots, **options)
    assert_near(q, qk_rope_kv_reference(qkv, caches[1], cos, sin, slots, **options), dtype)
    assert_near(caches[0].nan_to_num(-7.0), caches[1].nan_to_num(-7.0), dtype)
    in_torch = TorchOps().rotate_and_store(qkv, caches[2], Rotation(cos, sin), slots, **options)
    assert_near(q, in_torch, dtype)
    assert_near(caches[0].nan_to_num(-7.0), caches[2].nan_to_num(-7.0), dtype)
    if given == "q":
        assert caches[0].isnan().all()
        return
    # Against arithmetic of one head, written out.
    row = qkv.view(4, heads, head_dim)[2, num_heads + (num_kv_heads if given == "qkv" else 0)]
    value = row.float() * (row.float().square().mean() + 1e-6).rsqrt()
    value = (value if in_float32 else value.to(dtype)) * weight[num_heads + num_kv_heads]
    assert_near(caches[0][1, 1, 1, 0], value.to(dtype), dtype)


@devices_and_dtypes
def test_an_fp8_cache_gets_the_bytes_of_a_saturating_conversion(
    device: str, dtype: torch.dtype
) -> None:
    """Every finite 16-bit pattern as a value; in float32 its neighbours too."""
    half_type = torch.float16 if dtype is torch.float32 else dtype
    tokens, num_kv_heads, head_dim = 32, 8, 256
    shape = (tokens, num_kv_heads, head_dim)
    v = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(half_type).to(dtype).view(shape)
    v = v.nan_to_num(0.3)
    if dtype is torch.float32:
        toward = torch.tensor([0.0, 1e9, -1e9]).repeat(v.numel() // 3 + 1)[: v.numel()]
        v = torch.where(toward.view(shape) == 0, v, v.nextafter(toward.view(shape)))
    k = normal(*shape, dtype=dtype, device="cpu", seed=1, scale=300.0)
    q = normal(tokens, 1, head_dim, dtype=dtype, device="cpu", seed=2)
    qkv = torch.cat((q, k, v), 1).flatten(1).to(device)
    # Rotated by zero, so that the keys are exact as well.
    cos, sin = make_rotation(torch.zeros(tokens, dtype=torch.int64, device=device), head_dim)
    slots = torch.randperm(tokens).to(device)
    cache = make_cache(
        2, 16, num_kv_heads, head_dim, dtype=torch.float8_e4m3fn, device=device, heads_first=True
    )
    qk_rope_kv(qkv, cache, cos, sin, slots, num_heads=1)
    written = cache.flatten(0, 1)[slots].cpu()
    for index, x in enumerate((k, v)):
        expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(written[:, index].view(torch.uint8), expected.view(torch.uint8))
    assert not written.isnan().any() and written.float().abs().max() == 448
    reference = torch.full_like(cache, float("nan"))
    qk_rope_kv_reference(qkv, reference, cos, sin, slots, num_heads=1)
    assert torch.equal(reference.view(torch.uint8), cache.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("half", "scale"), [(32, 1.0), (40, 1.25), (64, 1.0)])
def test_rotation(device: str, half: int, scale: float) -> None:
    positions = torch.tensor([0, 1, 5, 4095, 131071], device=device)
    frequencies = (1e4 ** (-torch.arange(half) / half)).to(device)
    for actual, expected in zip(
        rotation(positions, frequencies, scale),
        rotation_reference(positions, frequencies, scale),
        strict=True,
    ):
        assert_near(actual, expected, torch.float32)


@devices_and_dtypes
def test_qk_rope_kv_of_many_tokens(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of more heads, the last one of fewer, write what small programs write."""
    monkeypatch.setattr("termgen.engine.device.kernels.rows.qk_rope_kv._MANY_TOKENS", 5)
    num_heads, num_kv_heads, head_dim = 20, 4, 64
    heads = num_heads + 2 * num_kv_heads
    qkv = normal(6, heads * head_dim, dtype=dtype, device=device, seed=3)
    weight = normal(heads - num_kv_heads, head_dim, dtype=dtype, device=device, seed=8)
    cos, sin = make_rotation(torch.tensor([0, 1, 2, 3, 500, 31000], device=device), head_dim)
    slots = torch.tensor([11, 0, 5, 14, 2, 3], device=device)
    few, many = (
        make_cache(4, 4, num_kv_heads, head_dim, dtype=dtype, device=device, heads_first=True)
        for _ in range(2)
    )
    arguments = {"num_heads": num_heads, "norm_weight": weight, "eps": 1e-6}
    q = qk_rope_kv(qkv, many, cos, sin, slots, **arguments)
    for part in (slice(0, 3), slice(3, 6)):
        small = qk_rope_kv(qkv[part], few, cos[part], sin[part], slots[part], **arguments)
        assert_near(q[part], small, dtype)
    assert_near(many.nan_to_num(-7.0), few.nan_to_num(-7.0), dtype)


def scaled_cache(kind: torch.dtype, heads: tuple[int, int], device: str) -> torch.Tensor:
    """The second layer of pages of two, all NaN."""
    size = 2 * 4 * heads[0] * head_items(heads[1], kind)
    pages = torch.zeros(4, 2 * size, dtype=kind, device=device)
    arguments = {"block_size": 4, "num_kv_heads": heads[0], "head_dim": heads[1], "part": 1}
    cache = kv_cache_view(TritonPagedAttention, pages, **arguments)
    fill_with_nan(cache, torch.arange(4, device=device))
    return cache


def assert_stored_alike(stored: torch.Tensor, expected: torch.Tensor, most: int) -> None:
    """Scales, and integers but for `most` of each, as float32 sums may end on another side."""
    for one, two in ((stored, expected), (scales_of(stored), scales_of(expected))):
        assert one.shape == two.shape
        differ = (one != two) & ~(one.isnan() & two.isnan())
        assert int(differ.sum()) <= most
    torch.testing.assert_close(stored, expected, atol=1, rtol=0)
    torch.testing.assert_close(
        scales_of(stored), scales_of(expected), atol=0, rtol=2e-2, equal_nan=True
    )


@devices_and_dtypes
@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize(("heads", "rotary_dim"), [((1, 64), 64), ((5, 80), 80), ((2, 128), 64)])
def test_stores_with_scales(
    device: str, dtype: torch.dtype, kind: torch.dtype, heads: tuple[int, int], rotary_dim: int
) -> None:
    num_kv_heads, head_dim = heads
    if kind == INT4 and head_dim == 80:
        pytest.skip("which attention refuses")
    slots = torch.tensor([11, 0, 5, 14, 2], device=device)
    qkv = normal(5, (4 + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device, seed=8)
    parts = qkv.view(5, -1, head_dim)
    parts[1, 4] = 0
    parts[2, 4] *= 1e-9
    parts[3, 4] *= 1e4
    parts[4, -1, 3] = float("nan")
    k, v = parts[:, 4 : 4 + num_kv_heads], parts[:, 4 + num_kv_heads :]
    stored, expected = (scaled_cache(kind, heads, device) for _ in range(2))
    q = store_kv(k, v, stored, slots, parts[:, :4])
    kv_store_reference(k, v, expected, slots)
    assert_stored_alike(stored, expected, most=0)
    assert torch.equal(q, queries_for(stored, parts[:, :4]))
    kept = read_slots(stored, slots, torch.float32)
    assert kept[4, 1, -1].isnan().all() and not kept[:4].isnan().any()
    wanted = torch.stack((spread(k), v.float()), 1)
    largest = wanted.abs().amax(-1, keepdim=True).nan_to_num()
    error = (kept - wanted).abs().nan_to_num()
    assert (error <= largest * LARGEST_ERROR[kind] + 1e-7).all()

    cos, sin = make_rotation(torch.arange(5, device=device), rotary_dim)
    arguments = {"num_heads": 4, "norm_weight": None}
    q = qk_rope_kv(qkv, stored, cos, sin, slots, **arguments)
    near = qk_rope_kv_reference(qkv, expected, cos, sin, slots, **arguments)
    assert_near(q, near, dtype)
    assert_stored_alike(stored, expected, most=4)


@devices_and_dtypes
@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("given", ["qkv", "qk", "q"])
@pytest.mark.parametrize(("rotary_dim", "in_float32"), [(64, True), (24, False)])
def test_heads_are_normalised_rotated_and_spread(
    device: str,
    dtype: torch.dtype,
    kind: torch.dtype,
    given: str,
    rotary_dim: int,
    in_float32: bool,
) -> None:
    num_heads, num_kv_heads, head_dim = 6, 2, 64
    heads = num_heads + {"qkv": 2, "qk": 1, "q": 0}[given] * num_kv_heads
    normed = num_heads + {"qkv": 1, "qk": 2, "q": 0}[given] * num_kv_heads
    kept = torch.float32 if in_float32 else dtype
    weight = normal(normed, head_dim, dtype=kept, device=device, seed=8)
    cos, sin = make_rotation(torch.tensor([0, 3, 1000, 31000], device=device), rotary_dim)
    slots = torch.tensor([11, 0, 5, 14], device=device)
    wide = normal(4, heads * head_dim + 16, dtype=dtype, device=device, seed=head_dim)
    caches = [scaled_cache(kind, (num_kv_heads, head_dim), device) for _ in range(3)]
    options = {"num_heads": num_heads, "norm_weight": weight, "eps": 1e-6}
    qkv = wide[:, : heads * head_dim].contiguous()
    expected = qk_rope_kv_reference(qkv, caches[1], cos, sin, slots, **options)
    in_torch = TorchOps().rotate_and_store(qkv, caches[2], Rotation(cos, sin), slots, **options)
    plain = torch.zeros(4, 4, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    unspread = qk_rope_kv_reference(qkv, plain, cos, sin, slots, **options)
    assert_near(expected, spread(unspread).to(dtype), dtype)
    # Over the projection's own queries, whose rows lie further apart.
    qkv = wide[:, : heads * head_dim]
    q = qkv.unflatten(1, (-1, head_dim))[:, :num_heads]
    assert qk_rope_kv(qkv, caches[0], cos, sin, slots, q=q, **options) is q
    assert_near(q, expected, dtype)
    assert_near(in_torch, expected, dtype)
    for other in caches[1:]:
        assert_stored_alike(caches[0], other, most=8)
    if given == "q":
        assert scales_of(caches[0]).isnan().all()
        return
    found, exact = (read_slots(cache, slots, torch.float32) for cache in (caches[0], plain))
    exact[:, 0] = spread(exact[:, 0])
    largest = exact.abs().amax(-1, keepdim=True)
    rounding = 0.02 if dtype is torch.bfloat16 else 0.002
    assert ((found - exact).abs() <= largest * (LARGEST_ERROR[kind] + rounding)).all()


@triton.jit
def _spread_kernel(x_ptr, D: tl.constexpr, SPAN: tl.constexpr):
    at = x_ptr + tl.arange(0, 4)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, spread_rows(tl.load(at), SPAN))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("head_dim", "span"), [(1, 1), (16, 16), (64, 16), (128, 128), (256, 256)])
def test_rows_are_spread_as_by_the_matrix(device: str, head_dim: int, span: int) -> None:
    x = normal(4, head_dim, dtype=torch.float32, device=device, seed=span, scale=9.0)
    bits = torch.arange(span)
    signs = [[1 - 2 * ((i & j).bit_count() % 2) for j in bits.tolist()] for i in bits.tolist()]
    matrix = torch.tensor(signs, dtype=torch.float64, device=device) * span**-0.5
    wanted = (x.double().view(-1, span) @ matrix).view(4, head_dim)
    one = x.view(-1, span)
    torch.testing.assert_close(spread(one).view_as(x).double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(spread(one[:1]), spread(one)[:1]), "sums depend on no other row"
    torch.testing.assert_close(spread(spread(one)), one, atol=1e-5, rtol=1e-5)
    by_kernel = x.clone()
    _spread_kernel[(1,)](by_kernel, head_dim, span)
    assert torch.equal(by_kernel, spread(one).view_as(x))


@pytest.mark.parametrize(("head_dim", "span"), [(64, 64), (80, 16), (72, 8), (96, 32), (33, 1)])
def test_a_head_is_spread_in_parts_that_are_powers_of_two(head_dim: int, span: int) -> None:
    first = torch.zeros(head_dim)
    first[0] = 1.0
    wanted = torch.zeros(head_dim)
    wanted[:span] = span**-0.5
    torch.testing.assert_close(spread(first), wanted)
    q, k = torch.randn(2, 5, head_dim, generator=torch.Generator().manual_seed(span))
    torch.testing.assert_close(spread(q) @ spread(k).T, q @ k.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "most"), [(INT8, 0.02), (INT4, 0.25)])
def test_a_large_channel_costs_the_others_no_precision(kind: torch.dtype, most: float) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 64, 1, 128, generator=generator)
    k[..., 5] += 30.0
    cache = scaled_cache(kind, (1, 128), "cpu")
    slots, wanted = torch.arange(16), k[:16]
    kv_store_reference(wanted, wanted, cache, slots)
    keys, values = read_slots(cache, slots, torch.float32).unbind(1)

    def error(found: torch.Tensor, q: torch.Tensor) -> float:
        exact = q[:, 0] @ wanted[:, 0].T
        return float((found - exact).norm() / exact.std() / exact.numel() ** 0.5)

    q[..., 5] = 0.0  # what the large channel adds is the same to all, nearly
    spread_error = error(queries_for(cache, q)[:, 0] @ keys[:, 0].T, q)
    plain_error = error(q[:, 0] @ values[:, 0].T, q)
    print(spread_error, plain_error)
    assert spread_error < most and plain_error > 3 * spread_error


@devices_and_dtypes
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (5, 80), (8, 128)])
def test_store_kv(
    device: str, dtype: torch.dtype, heads_first: bool, num_kv_heads: int, head_dim: int
) -> None:
    # Parts of one projection's output, as a model that fuses q, k and v has them.
    shape = (5, 3 * num_kv_heads, head_dim)
    _, k, v = normal(*shape, dtype=dtype, device=device, seed=head_dim).chunk(3, dim=1)
    slots = torch.tensor([11, 0, 5, 14, 2], device=device)
    stored, expected = (
        make_cache(4, 4, num_kv_heads, head_dim, dtype=dtype, device=device, heads_first=heads)
        for heads in (heads_first, False)
    )
    q = normal(5, 2, head_dim, dtype=dtype, device=device, seed=1)
    assert store_kv(k, v, stored, slots, q) is q
    kv_store_reference(k, v, expected, slots)
    torch.testing.assert_close(stored, expected, atol=0, rtol=0, equal_nan=True)


@devices_and_dtypes
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_an_fp8_cache_takes_keys_and_values_in_its_units(
    device: str, dtype: torch.dtype, rotary_dim: int
) -> None:
    scales = LayerScales(0.25, 3.0)
    qkv = normal(5, 8 * 64, dtype=dtype, device=device, seed=8, scale=200.0)
    cos, sin = make_rotation(torch.arange(5, device=device), rotary_dim)
    slots = torch.tensor([11, 0, 5, 14, 2], device=device)
    caches = [torch.zeros(4, 4, 2, 2, 64, device=device).to(torch.float8_e4m3fn) for _ in range(3)]
    arguments = {"num_heads": 4, "norm_weight": None, "eps": 1e-6, "cache_scales": scales}
    q = qk_rope_kv(qkv, caches[0], cos, sin, slots, **arguments)
    qk_rope_kv_reference(qkv, caches[1], cos, sin, slots, **arguments)
    in_torch = TorchOps().rotate_and_store(qkv, caches[2], Rotation(cos, sin), slots, **arguments)
    assert_near(q, in_torch, dtype)
    stored, *others = (cache.float() for cache in caches)
    for other in others:
        off = (stored - other).abs() / other.abs().clamp(min=1.0)
        assert (off > 0).sum() <= 8 and off.max() < 0.13, "a number next to two others at most"
    values = qkv.view(5, 8, 64)[:, 6:].float() / scales.value
    kept = stored.flatten(0, 1)[slots][:, 1]
    assert ((kept - values).abs() <= values.abs() / 16 + 1e-3).all()
    stored_alone, expected = (torch.zeros_like(caches[0]) for _ in range(2))
    k, v = qkv.view(5, 8, 64)[:, 4:6], qkv.view(5, 8, 64)[:, 6:]
    q = qkv.view(5, 8, 64)[:, :4]
    assert store_kv(k, v, stored_alone, slots, q, scales) is q
    assert TorchOps().store(k, v, expected, slots, q, scales) is q
    assert torch.equal(stored_alone.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(stored_alone.flatten(0, 1)[slots][:, 1].float(), kept)
    unscaled = qkv.view(5, 8, 64)[:, 4:6].abs().max() / scales.key
    assert unscaled > 448 and stored.flatten(0, 1)[slots][:, 0].abs().max() == 448
