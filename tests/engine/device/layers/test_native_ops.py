"""The kernels against `TorchOps`; `test_ops` has that against its definitions."""

from __future__ import annotations

import pytest
import torch

from termgen.engine.device.layers.native_ops import NativeOps
from termgen.engine.device.layers.ops import Rotation, TorchOps

NATIVE, REFERENCE = NativeOps(), TorchOps()
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


class Refusing:
    """Kernels that must not be called."""

    def __getitem__(self, name: str) -> None:
        raise AssertionError(f"{name} was called")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
def test_norms(num_rows: int) -> None:
    x, weight = normal(num_rows, 96), normal(96, seed=1)
    torch.testing.assert_close(
        NATIVE.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), **CLOSE
    )
    residual = normal(num_rows, 96, seed=2)
    total, before = residual.clone(), x.clone()
    expected = REFERENCE.add_rms_norm(x, total, weight, 1e-5)
    torch.testing.assert_close(NATIVE.add_rms_norm(x, residual, weight, 1e-5), expected, **CLOSE)
    assert torch.equal(residual, total) and torch.equal(x, before)


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_store(num_rows: int, head_dim: int, has_norm: bool) -> None:
    num_heads, num_kv_heads = 6, 3
    qkv = normal(num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
    weight = normal(num_heads + num_kv_heads, head_dim, seed=1) if has_norm else None
    rotation = REFERENCE.rotation(
        torch.arange(num_rows) * 7, torch.logspace(0, -3, head_dim // 2), 1.1
    )
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(4))[:num_rows]
    caches = [torch.full((8, 16, 2, num_kv_heads, head_dim), 7.0) for _ in range(2)]
    memory = torch.empty(num_rows, num_heads, head_dim)
    queries = [
        ops.rotate_and_store(
            qkv, cache, rotation, slots, num_heads=num_heads, norm_weight=weight, eps=1e-6, q=q
        )
        for ops, cache, q in zip((NATIVE, REFERENCE), caches, (memory, None), strict=True)
    ]
    torch.testing.assert_close(*queries, **CLOSE)
    torch.testing.assert_close(*caches, **CLOSE)
    assert queries[0].data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("num_rows", [1, 40])
def test_activation(num_rows: int) -> None:
    gate_up = normal(num_rows, 192) * 30
    gate_up[0, :5] = torch.tensor([-1000.0, 1000.0, 0.0, -88.0, 88.0])
    expected = REFERENCE.gated_activation(gate_up, "silu")
    torch.testing.assert_close(NATIVE.gated_activation(gate_up, "silu"), expected, **CLOSE)
    gate_up[0, 0] = float("nan")
    assert NATIVE.gated_activation(gate_up, "silu")[0, 0].isnan()


def test_what_does_not_fit_runs_in_torch() -> None:
    ops = NativeOps()
    ops._kernels = Refusing()  # type: ignore[assignment]
    half = torch.bfloat16
    for x, weight in (
        (normal(3, 96, dtype=half), normal(96, dtype=half)),
        (normal(3, 90), normal(90)),
        (normal(3, 192)[:, ::2], normal(96)),
        (normal(2, 3, 96), normal(96)),
    ):
        expected = REFERENCE.rms_norm(x, weight, 1e-5)
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), expected)
        total, residual = x.clone(), x.clone()
        expected = REFERENCE.add_rms_norm(x, total, weight, 1e-5)
        assert torch.equal(ops.add_rms_norm(x, residual, weight, 1e-5), expected)
    for gate_up, activation in (
        (normal(3, 192), "gelu_tanh"),
        (normal(3, 192, dtype=half), "silu"),
        (normal(3, 90), "silu"),
    ):
        expected = REFERENCE.gated_activation(gate_up, activation)
        assert torch.equal(ops.gated_activation(gate_up, activation), expected)


@pytest.mark.parametrize("what", ["small heads", "part of a head", "half cache", "other order"])
def test_rotations_that_do_not_fit_run_in_torch(what: str) -> None:
    ops = NativeOps()
    ops._kernels = Refusing()  # type: ignore[assignment]
    head_dim = 16 if what == "small heads" else 64
    rotary_dim = 32 if what == "part of a head" else head_dim
    angles = torch.cat([normal(3, rotary_dim // 2)] * 2, 1)[:, None]
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(rotary_dim // 2)
    rotation = Rotation(angles.cos(), angles.sin() * signs)
    dtype = torch.bfloat16 if what == "half cache" else torch.float32
    cache = torch.zeros(4, 4, 2, 1, head_dim, dtype=dtype)
    if what == "other order":
        cache = torch.zeros(4, 2, 1, 4, head_dim).permute(0, 3, 1, 2, 4)
    other, qkv = cache.clone(), normal(3, 4 * head_dim)
    slots = torch.tensor([5, 4, 15])
    options = {"num_heads": 2, "norm_weight": None, "eps": 1e-6}
    q = ops.rotate_and_store(qkv, cache, rotation, slots, **options)  # type: ignore[arg-type]
    expected = REFERENCE.rotate_and_store(qkv, other, rotation, slots, **options)  # type: ignore[arg-type]
    assert torch.equal(q, expected) and torch.equal(cache, other)
