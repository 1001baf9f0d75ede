"""Device of the Triton kernel tests: compiled on CUDA, or interpreted on the CPU.

Import it before anything that imports triton: it asks for the interpreter where there is no GPU.
`pytest.importorskip` of triton stays with the tests. The interpreter knows float32 and float16.
"""

from __future__ import annotations

import os

import pytest
import torch
import triton_interpreter

IS_CUDA = torch.cuda.is_available()
if not IS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_cpu_only = pytest.mark.skipif(not IS_INTERPRETED, reason="kernels are compiled here")
_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16

DEVICES = [pytest.param("cpu", marks=_cpu_only), pytest.param("cuda", marks=pytest.mark.gpu)]
DEVICES_AND_DTYPES = [
    pytest.param("cpu", _F32, marks=_cpu_only, id="cpu-f32"),
    pytest.param("cpu", _F16, marks=_cpu_only, id="cpu-f16"),
    pytest.param("cuda", _F32, marks=pytest.mark.gpu, id="cuda-f32"),
    pytest.param("cuda", _F16, marks=pytest.mark.gpu, id="cuda-f16"),
    pytest.param("cuda", _BF16, marks=pytest.mark.gpu, id="cuda-bf16"),
]
TOLERANCE = {_F32: 2e-5, _F16: 3e-3, _BF16: 2e-2}


def require_triton() -> None:
    """Skip the calling test module without triton; make its interpreter ready."""
    pytest.importorskip("triton", reason="triton is not installed")
    if IS_INTERPRETED:
        triton_interpreter.prepare()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal within what `dtype` resolves; a NaN is never near anything."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance
    )


def normal(
    *shape: int, dtype: torch.dtype, device: str, seed: int, scale: float = 1.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def poison(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """An output buffer that shows which elements were not written."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
