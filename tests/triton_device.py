"""Where the tests of Triton kernels run: compiled on CUDA, or interpreted on the CPU.

Import it before anything that imports triton: it asks for the interpreter where there is no GPU.
`pytest.importorskip` of triton stays with the tests. The interpreter knows float32 and float16.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

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
    """Skip the calling test module without triton; mend its interpreter for a new numpy."""
    pytest.importorskip("triton", reason="triton is not installed")
    if not IS_INTERPRETED:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "takes_index", False):
        return

    def patch_with_index(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        # Its own takes the only element of an array by int(), which numpy no longer does.
        tensor.__index__ = lambda self: int(self.handle.data.item())  # type: ignore[attr-defined]

    patch_with_index.takes_index = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_with_index
    _mend_fp8(interpreter)


def _mend_fp8(interpreter: Any) -> None:
    """Its own conversion to e4m3 does not round to nearest even, and that from it knows no NaN.

    What is too large becomes NaN here: a kernel must not count on a device that saturates.
    """
    import triton.language as tl

    types = {tl.float32: _F32, tl.float16: _F16, tl.float8e4nv: torch.float8_e4m3fn}
    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.float8e4nv not in (source, target) or not {source, target} <= types.keys():
            return convert(self, src, dst_type, rounding_mode)
        values = torch.from_numpy(src.data.copy()).view(types[source])
        if target == tl.float8e4nv:
            values = values.masked_fill(values.abs() > 448, float("nan"))
        values = values.to(types[target])
        data = values.view(torch.uint8).numpy().view(interpreter._get_np_dtype(dst_type))
        return interpreter.TensorHandle(data, target)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


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
    """An output that shows what was not written."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
