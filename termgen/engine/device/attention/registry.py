"""Choice of the attention backend.

Called by the runner's builder, once per engine. A literal dictionary, resolved lazily, so that a
backend's kernels are imported only where they can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch

from termgen.config import ATTENTION_BACKENDS
from termgen.engine.device import native
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.kernels.kv_cache import INT4, SCALED, setting_of
from termgen.errors import ConfigError

if TYPE_CHECKING:
    from termgen.engine.device.attention.base import AttentionBackend, AttentionShape

BACKENDS = {
    "triton": "termgen.engine.device.attention.triton_paged:TritonPagedAttention",
    "native": "termgen.engine.device.attention.native_paged:NativeAttention",
    "torch_reference": "termgen.engine.device.attention.torch_reference:TorchReferenceAttention",
    "flashinfer": "termgen.engine.device.attention.flashinfer_paged:FlashInferAttention",
    "flash_attn": "termgen.engine.device.attention.flash_attn_paged:FlashAttnAttention",
}
"""The first that runs a shape is its default."""
EXTRAS = {"flashinfer": "flashinfer", "flash_attn": "flash-attn"}
"""Backends that need another package, of their own name, and the extra that installs it. They run
only when asked for."""
assert tuple(BACKENDS) == ATTENTION_BACKENDS


def make_backends(
    name: str | None, shapes: Sequence[AttentionShape]
) -> tuple[list[AttentionBackend], list[AttentionShape], str]:
    """A backend of one kind for each shape of an engine, which keep the plans of that engine's
    current step.

    Also the shapes with their block size settled, and why a faster kind was passed over, or "".
    Raises ConfigError when `name` cannot run one of the shapes.
    """
    passed_over = ""
    for known in BACKENDS:
        if name != known and (name is not None or known in EXTRAS):
            continue
        reason = why_not(known, *shapes)
        if not reason:
            backend = backend_class(known)
            size = backend.capabilities.preferred_block_size
            settled = [replace(shape, block_size=shape.block_size or size) for shape in shapes]
            return [backend(shape) for shape in settled], settled, passed_over
        if name is not None:
            raise ConfigError(
                f"attention_backend {name}: {reason}; torch_reference runs everywhere",
                param="attention_backend",
            )
        unquantized = [replace(shape, kv_cache_dtype=shape.dtype) for shape in shapes]
        if shapes[0].device.type != "cpu" and not why_not(known, *unquantized):
            # Half the bytes are asked for to be faster: not for them at the price of the kernels.
            raise ConfigError(
                f"kv_cache_dtype {setting_of(shapes[0].kv_cache_dtype)}: {reason}; use "
                "kv_cache_dtype auto, or attention_backend torch_reference, which is slow",
                param="kv_cache_dtype",
            )
        passed_over = passed_over or f"{known} attention cannot run: {reason}"
    raise AssertionError("torch_reference refused a shape")


def why_not(name: str, *shapes: AttentionShape) -> str:
    """The reason a backend cannot run these shapes; empty if it can."""
    return next(filter(None, (_why_not(name, shape) for shape in shapes)), "")


def _why_not(name: str, shape: AttentionShape) -> str:
    device_type = shape.device.type
    if name == "triton" and (reason := why_unusable(shape.device, dtype=shape.kv_cache_dtype)):
        return reason
    if name == "native" and (reason := native.why_unusable()):
        return reason
    capabilities = backend_class(name).capabilities
    if device_type not in capabilities.device_types:
        return f"it runs on {_words(capabilities.device_types)}, not {device_type}"
    if shape.dtype not in capabilities.dtypes:
        dtypes = {_dtype_name(dtype) for dtype in capabilities.dtypes}
        return f"it computes in {_words(dtypes)}, not {_dtype_name(shape.dtype)}"
    if shape.kv_cache_dtype not in capabilities.kv_cache_dtypes | {shape.dtype}:
        name_of = SCALED.get(shape.kv_cache_dtype, _dtype_name(shape.kv_cache_dtype))
        return f"a KV cache of {name_of} is not supported"
    if capabilities.head_dims is not None and shape.head_dim not in capabilities.head_dims:
        return f"heads of size {shape.head_dim} are not supported"
    if shape.kv_cache_dtype == INT4:
        known = capabilities.int4_head_dims
        if shape.head_dim % 2 or (known is not None and shape.head_dim not in known):
            return f"heads of size {shape.head_dim} are not supported with a KV cache of int4"
    if missing := shape.needs - capabilities.features:
        return f"{' and '.join(sorted(missing))} are not supported"
    size = shape.block_size or capabilities.preferred_block_size
    if capabilities.block_sizes is not None and size not in capabilities.block_sizes:
        return f"block_size must be {_words({str(s) for s in capabilities.block_sizes})}"
    if name in EXTRAS and find_spec(name) is None:
        return f"the package is not installed: pip install 'termgen[{EXTRAS[name]}]'"
    least = capabilities.min_compute_capability
    if least is not None and (has := torch.cuda.get_device_capability(shape.device)) < least:
        return f"it needs compute capability {least[0]}.{least[1]}, not {has[0]}.{has[1]}"
    return ""


def backend_class(name: str) -> type[AttentionBackend]:
    backend: type[AttentionBackend] = resolve_name(BACKENDS[name])
    return backend


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(names: frozenset[str] | set[str]) -> str:
    return " or ".join(sorted(names))
