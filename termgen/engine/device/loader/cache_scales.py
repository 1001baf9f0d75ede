"""The scales for an fp8 KV cache that a checkpoint was calibrated with, for each layer.

Called by the runner's builder where the cache is fp8; with other types they stay in the files. The
names are those that vLLM, compressed-tensors and ModelOpt write: below a layer's attention, below
`attn` in it, or below the projection; an older one has the same scale for keys and values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch

from termgen.errors import CorruptFileError
from termgen.vocabulary.device.kv_cache_types import LayerScales

_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|k_proj\.)?(k)_scale|(?:attn\.|v_proj\.)?(v)_scale|(?:attn\.)?(kv)_scale)",
    re.ASCII,
)


def read_cache_scales(
    names: Iterable[str], read: Callable[[str], torch.Tensor]
) -> dict[int, LayerScales]:
    """Layer -> its scales, 1 where only the other one is in the files, unless both are 1. names: of
    a model's tensors, as its own layers are named. Raises CorruptFileError, which names the tensor.
    """
    found: dict[int, dict[str, tuple[str, float]]] = {}
    for name in sorted(names):
        if (match := _NAME.fullmatch(name)) is None:
            continue
        layer, kind = int(match[1]), match[2] or match[3] or match[4]
        scale, of_layer = _scale(name, read(name)), found.setdefault(layer, {})
        for which in ("k", "v") if kind == "kv" else (kind,):
            other, known = of_layer.setdefault(which, (name, scale))
            if known != scale:
                raise CorruptFileError(f"tensor {name} is {scale:g}, but {other} is {known:g}")
    made = {layer: _of_layer(scales) for layer, scales in found.items()}
    return {layer: scales for layer, scales in made.items() if scales != (1.0, 1.0)}


def _of_layer(scales: Mapping[str, tuple[str, float]]) -> LayerScales:
    return LayerScales(*(scales.get(which, ("", 1.0))[1] for which in ("k", "v")))


def _scale(name: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1:
        raise CorruptFileError(
            f"tensor {name} has shape {list(tensor.shape)}, and a KV cache takes one scale a layer"
        )
    scale = float(tensor)
    # Both are float32 in kernels, and so is their reciprocal.
    if not math.isfinite(scale) or not 1e-30 < scale < 1e30:
        raise CorruptFileError(f"tensor {name} is {scale:g}, and a scale must be above 0, finite")
    return scale
