"""Which attention backend runs where.

Called by the runner's builder, once per engine. A literal dictionary, resolved lazily, so that a
backend's kernels are imported only where they can run.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from termgen.config import ATTENTION_BACKENDS
from termgen.engine.kernels import why_unusable
from termgen.errors import ConfigError

if TYPE_CHECKING:
    from termgen.engine.attention.base import AttentionBackend, AttentionShape

BACKENDS = {
    "triton": "termgen.engine.attention.triton_paged:TritonPagedAttention",
    "torch_reference": "termgen.engine.attention.torch_reference:TorchReferenceAttention",
}
"""The first that runs a shape is its default."""
assert tuple(BACKENDS) == ATTENTION_BACKENDS


def make_backend(name: str | None, shape: AttentionShape) -> tuple[AttentionBackend, str]:
    """A backend for one engine, which keeps the plan of that engine's current step.

    Also why a faster one was passed over, or "". Raises ConfigError when `name` cannot run `shape`.
    """
    passed_over = ""
    for known in BACKENDS:
        if name not in (None, known):
            continue
        reason = why_not(known, shape)
        if not reason:
            return _backend_class(known)(shape), passed_over
        if name is not None:
            raise ConfigError(
                f"attention_backend {name}: {reason}; torch_reference runs everywhere",
                param="attention_backend",
            )
        if not why_not(known, replace(shape, kv_cache_dtype=shape.dtype)):
            # Half the bytes are asked for to be faster: not for them at the price of the kernels.
            raise ConfigError(
                f"kv_cache_dtype fp8: {reason}; use kv_cache_dtype auto, or attention_backend "
                "torch_reference, which is slow",
                param="kv_cache_dtype",
            )
        passed_over = passed_over or f"{known} attention cannot run: {reason}"
    raise AssertionError("torch_reference refused a shape")


def why_not(name: str, shape: AttentionShape) -> str:
    """Why a backend cannot run this shape; empty when it can."""
    device_type = shape.device.type
    if name == "triton" and (reason := why_unusable(shape.device, dtype=shape.kv_cache_dtype)):
        return reason
    capabilities = _backend_class(name).capabilities
    if device_type not in capabilities.device_types:
        return f"it runs on {_words(capabilities.device_types)}, not {device_type}"
    if shape.dtype not in capabilities.dtypes:
        dtypes = {_dtype_name(dtype) for dtype in capabilities.dtypes}
        return f"it computes in {_words(dtypes)}, not {_dtype_name(shape.dtype)}"
    if shape.kv_cache_dtype not in capabilities.kv_cache_dtypes | {shape.dtype}:
        return f"a KV cache of {_dtype_name(shape.kv_cache_dtype)} is not supported"
    if capabilities.head_dims is not None and shape.head_dim not in capabilities.head_dims:
        return f"heads of size {shape.head_dim} are not supported"
    if capabilities.block_sizes is not None and shape.block_size not in capabilities.block_sizes:
        return f"block_size must be {_words({str(s) for s in capabilities.block_sizes})}"
    return ""


def _backend_class(name: str) -> type[AttentionBackend]:
    module, _, attribute = BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(names: frozenset[str] | set[str]) -> str:
    return " or ".join(sorted(names))
