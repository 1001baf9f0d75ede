"""The types in which keys and values are kept, and the way into the 8-bit one.

fp8 is e4m3: four bits of exponent, three of mantissa, up to 448, no infinity. Values are kept as
they are (a scale of 1): what is larger becomes the largest, the rest is rounded to nearest even.
Used by whatever writes or sizes a KV cache; kernels do the same in `kernels.qk_rope_kv`.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def kv_cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The setting's type: `auto` is the model's."""
    return model_dtype if name == "auto" else FP8


def to_cache_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the type of a cache. Some releases of torch turn what is too large into NaN."""
    if dtype == FP8:
        x = x.clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def movable(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can copy by index: bytes, for an 8-bit cache."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache
