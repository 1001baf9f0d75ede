"""The operations between matrix products, on the CPU, against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from termgen.engine.device.layers.ops import Rotation, TorchOps

OPS = TorchOps()
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm(dtype: torch.dtype, eps: float) -> None:
    x, weight = normal(5, 96, dtype=dtype), normal(96, dtype=dtype, seed=1)
    x[2] = 0.0
    x[3] *= 1000.0
    expected = rms_norm(x, weight, eps)
    tolerance = TOLERANCE[dtype]
    actual = OPS.rms_norm(x, weight, eps)
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_add_rms_norm_adds_in_place() -> None:
    x, residual, weight = normal(3, 64), normal(3, 64, seed=1), normal(64, seed=2)
    total = x + residual
    actual = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(actual.double(), rms_norm(total, weight, 1e-5), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm_add_norm_with_weights_of_float32(dtype: torch.dtype) -> None:
    x, residual = normal(3, 64, dtype=dtype), normal(3, 64, dtype=dtype, seed=1)
    first, second = normal(64, seed=2), normal(64, seed=3)
    total = residual.double() + rms_norm(x, first, 0.3)
    actual = OPS.norm_add_norm(x, residual, first, second, 0.3, 1e-5)
    assert actual.dtype is residual.dtype is dtype
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(residual.double(), total, **tolerance)
    torch.testing.assert_close(actual.double(), rms_norm(residual, second, 1e-5), **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sigmoid_gate_is_computed_where_the_gate_was(dtype: torch.dtype) -> None:
    x, gate = normal(3, 64, dtype=dtype), normal(3, 64, dtype=dtype, seed=1)
    expected = x.double() * torch.sigmoid(gate.double())
    actual = OPS.sigmoid_gate(x, gate)
    assert actual.data_ptr() == gate.data_ptr() and actual.dtype is dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_weight_is_not_rounded_before_the_product(dtype: torch.dtype) -> None:
    """Gemma's norm rounds (x * weight), where others round x before the product."""
    x, weight = normal(64, 96, dtype=dtype), normal(96, seed=1)
    exact = rms_norm(x, weight, 1e-6)
    assert torch.equal(OPS.rms_norm(x, weight, 1e-6), exact.to(dtype))
    assert not torch.equal(OPS.rms_norm(x, weight.to(dtype), 1e-6), exact.to(dtype))


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_store(has_norm: bool) -> None:
    num_heads, num_kv_heads, head_dim, num_tokens = 4, 2, 8, 5
    qkv = normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    weight = normal(num_heads + num_kv_heads, head_dim, seed=1) if has_norm else None
    angles = normal(num_tokens, head_dim // 2, seed=2)
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    cache = torch.full((4, 4, 2, num_kv_heads, head_dim), float("nan"))
    slots = torch.tensor([5, 4, 15, 8, 11])
    q = OPS.rotate_and_store(
        qkv, cache, rotation, slots, num_heads=num_heads, norm_weight=weight, eps=1e-6
    )

    heads = qkv.view(num_tokens, -1, head_dim)
    for token in range(num_tokens):
        for head in range(num_heads + num_kv_heads):
            x = heads[token, head].double()
            if weight is not None:
                x = rms_norm(x, weight[head], 1e-6)
            a, b = x.chunk(2)
            c, s = cos[token].double(), sin[token].double()
            turned = torch.cat((a * c - b * s, b * c + a * s)).float()
            block, offset = divmod(int(slots[token]), 4)
            if head < num_heads:
                actual = q[token, head]
            else:
                actual = cache[block, offset, 0, head - num_heads]
                value = heads[token, head + num_kv_heads]
                assert torch.equal(cache[block, offset, 1, head - num_heads], value)
            torch.testing.assert_close(actual, turned, atol=1e-5, rtol=1e-5)
    given = torch.full_like(q, float("nan")).contiguous()
    again = OPS.rotate_and_store(
        qkv, cache, rotation, slots, num_heads=num_heads, norm_weight=weight, eps=1e-6, q=given
    )
    assert again.data_ptr() == given.data_ptr() and torch.equal(given, q)
    untouched = torch.ones(16, dtype=torch.bool)
    untouched[slots] = False
    assert cache.flatten(0, 1)[untouched].isnan().all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation(activation: str) -> None:
    gate_up = normal(3, 20)
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        expected = gate / (1 + (-gate).exp()) * up
    elif activation == "gelu":
        expected = gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    else:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        expected = gate * 0.5 * (1 + inner.tanh()) * up
    actual = OPS.gated_activation(gate_up, activation)
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-6)
