"""The scales for an fp8 KV cache that a checkpoint was calibrated with, for each layer.

Called by the runner's builder where the cache is fp8; with other types they stay in the files. The
names are those that vLLM, compressed-tensors and ModelOpt write: below a layer's attention, below
`attn` in it, or below the projection, whose output's scale it is in older files; still older ones
have the same scale for keys and values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from termgen.errors import CorruptFileError
from termgen.vocabulary.device.kv_cache_types import LayerScales

_NAME = re.compile(r"(.+?)(\.attn|\.[kv]_proj)?\.(k|v|kv)_scale", re.ASCII)
_BELOW = {"k": ("", ".attn", ".k_proj"), "v": ("", ".attn", ".v_proj"), "kv": ("", ".attn")}
"""Where a scale of keys, of values and of both may lie below a layer's attention."""
_OLD_NAME = re.compile(r"(.+)\.([kv])_proj\.output_scale", re.ASCII)
_ATTENTION = re.compile(r"model\.layers\.(\d+)\.self_attn", re.ASCII)


def read_cache_scales(
    names: Iterable[str], read: Callable[[str], torch.Tensor]
) -> dict[int, LayerScales]:
    """Layer -> its scales, 1 where only the other one is in the files, unless both are 1. names: of
    a model's tensors, as its own layers are named. Raises CorruptFileError, which names the tensor.
    """
    places = []
    for name in names:
        for attention, kind in _readings(name):
            if (match := _ATTENTION.fullmatch(attention)) is not None:
                places.append((name, int(match[1]), kind))
    return _read(places, read)


def read_scales_of_modules(
    names: Iterable[str], read: Callable[[str], torch.Tensor], layers: Mapping[str, int]
) -> dict[int, LayerScales]:
    """The same for a model of another code. names: of tensors that are none of its parameters.
    layers: of the modules that attend, by their names, which the tensors' may have something ahead
    of. Raises CorruptFileError also for a scale that belongs to none of them."""
    places = []
    for name in names:
        readings = list(_readings(name))
        found = {
            (layer, kind)
            for attention, kind in readings
            for module, layer in layers.items()
            if f".{attention}".endswith(f".{module}")
        }
        if readings and len(found) != 1:
            raise CorruptFileError(
                f"tensor {name} is a scale for an fp8 KV cache of no layer that this model has; "
                "use kv_cache_dtype auto or int8"
            )
        places += [(name, *place) for place in found]
    return _read(places, read)


def _readings(name: str) -> Iterator[tuple[str, str]]:
    """(the attention, what the scale is of) as a name may be meant; none if it is no scale's."""
    if (old := _OLD_NAME.fullmatch(name)) is not None:
        yield old[1], old[2]
    if (match := _NAME.fullmatch(name)) is None:
        return
    path, below, kind = match[1], match[2] or "", match[3]
    if below in _BELOW[kind]:
        yield path, kind
    if below:  # an attention that is itself named so
        yield path + below, kind


def _read(
    places: Iterable[tuple[str, int, str]], read: Callable[[str], torch.Tensor]
) -> dict[int, LayerScales]:
    """places: a tensor's name, its layer, and what it is of."""
    found: dict[int, dict[str, tuple[str, float]]] = {}
    for name, layer, kind in sorted(places):
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
