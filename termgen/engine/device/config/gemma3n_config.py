"""Gemma 3n's config.json: residual streams, closed gates, and which layers share keys and values.

What a file leaves out gets the value that transformers' class has for it.
"""

from __future__ import annotations

from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.gemma4_config import kv_sources, layer_kinds, text_values
from termgen.engine.device.config.layer_differences import (
    LayerDifferences,
    PerLayerInputs,
    ResidualStreams,
)
from termgen.errors import UnsupportedModelError

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
_FULL_EVERY = 5
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""The first layers have closed gates, of a model that has more of them."""
_MOST_STREAMS = 64


def gemma3n_keys(read: ConfigReader) -> ConfigReader:
    """The text model's config in the keys of other families: of a model with other parts, its
    text_config. Raises UnsupportedModelError or CorruptFileError naming the key."""
    text, values = text_values(read, _DEFAULTS)
    if values.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "config.json: use_bidirectional_attention is not supported for Gemma 3n models"
        )
    kinds = layer_kinds(text, _FULL_EVERY)
    sizes = _sizes(text, len(kinds))
    changed = {
        "hidden_act": values["hidden_activation"],
        "layer_types": kinds,
        "rope_parameters": gemma3_ropes(text),
        "intermediate_size": sizes[0],
        "intermediate_sizes": sizes,
    }
    return ConfigReader({**values, **changed}, text.prefix)


def _sizes(text: ConfigReader, num_layers: int) -> list[int]:
    sizes = text.get("intermediate_size")
    if not isinstance(sizes, list | tuple):
        return [text.integer("intermediate_size")] * num_layers
    if len(sizes) != num_layers:
        text.fail("intermediate_size", f"must be a size, or a list of {num_layers}")
    one = (ConfigReader({"intermediate_size": size}, text.prefix) for size in sizes)
    return [read.integer("intermediate_size") for read in one]


def gemma3_ropes(text: ConfigReader) -> dict[str, dict[str, Any]]:
    """The rotation of each kind of layer; older configs scale only layers without a window."""
    nothing = ConfigReader({})
    ropes = text.child("rope_parameters") or nothing
    for key in ropes.present():
        if key not in ("full_attention", "sliding_attention"):
            ropes.fail(key, "is neither full_attention nor sliding_attention")
    old = text.child("rope_scaling")
    for read in (old, ropes.child("full_attention"), ropes.child("sliding_attention")):
        if read is not None and read.get("type") is not None and read.get("rope_type") is None:
            raise UnsupportedModelError(
                f"config.json: {read.prefix}.type is an old name that transformers ignores for"
                " Gemma 3 models: call it rope_type, or remove the scaling"
            )
    full = ropes.child("full_attention") or old or nothing
    window = ropes.child("sliding_attention") or nothing
    theta = text.number("rope_theta", default=1e6)
    window_theta = text.number("rope_local_base_freq", default=1e4)
    return {
        "full_attention": {"rope_theta": theta, **full.present()},
        "sliding_attention": {"rope_theta": window_theta, **window.present()},
    }


def gemma3n_differences(read: ConfigReader) -> LayerDifferences:
    """read: as `gemma3n_keys` returns it, as in the functions below."""
    sizes: list[int] = read.get("intermediate_sizes")
    return LayerDifferences(
        kv_sources=kv_sources(read, read.get("layer_types")),
        mlp_sizes=tuple(sizes) if len(set(sizes)) > 1 else (),
        gate_sparsities=_sparsities(read, len(sizes)),
    )


def _sparsities(read: ConfigReader, num_layers: int) -> tuple[float, ...]:
    key = "activation_sparsity_pattern"
    parts = read.get(key)
    if parts is None:
        sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        parts = [_SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    if not isinstance(parts, list | tuple) or len(parts) != num_layers:
        read.fail(key, f"must be a list of {num_layers} numbers")
    for part in parts:
        if not isinstance(part, int | float) or isinstance(part, bool) or not 0 <= part < 1:
            read.fail(key, f"must hold numbers from 0 to below 1, not {part!r}")
    return tuple(float(part) for part in parts) if any(parts) else ()


def gemma3n_inputs(read: ConfigReader) -> PerLayerInputs:
    return PerLayerInputs(
        vocab_size=read.integer("vocab_size_per_layer_input"),
        size=read.integer("hidden_size_per_layer_input"),
    )


def gemma3n_streams(read: ConfigReader) -> ResidualStreams:
    num = read.integer("altup_num_inputs", least=2, most=_MOST_STREAMS)
    return ResidualStreams(
        num=num,
        active=read.integer("altup_active_idx", least=0, most=num - 1),
        has_output_scale=read.flag("altup_correct_scale", default=True),
        laurel_rank=read.integer("laurel_rank"),
    )
