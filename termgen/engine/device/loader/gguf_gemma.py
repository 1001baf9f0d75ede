"""What the GGUF metadata of Gemma 3n and 4 says, in the keys of a config.json.

Called by `gguf_config`, which reads the keys that all families have.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from termgen.engine.device.loader.gguf_families import experts
from termgen.engine.device.loader.gguf_keys import ROPE_FACTORS, GGUFKeys

_LEAST_ENDLESS = 1e29
"""A divisor of rotary frequencies that stands for no rotation: the converter writes 1e30."""
# What llama.cpp takes Gemma 3n to have where a file has no key.
_GEMMA3N_PATTERN, _GEMMA3N_OWN_LAYERS, _GEMMA3N_CAP = 5, 20, 30.0
_GEMMA3N_THETA, _GEMMA3N_WINDOW_THETA = 1e6, 1e4
_GEMMA3N_STREAMS = 4
_FULL, _SLIDING = "full_attention", "sliding_attention"


def gemma3n(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    kinds = keys.window_layers(layers, _GEMMA3N_PATTERN)
    num_own = _num_own(keys, kinds, default=max(layers - _GEMMA3N_OWN_LAYERS, 0))
    num = keys.size("altup.num_inputs", default=_GEMMA3N_STREAMS)
    active = keys.size("altup.active_idx", default=0, least=0)
    if active >= num:
        keys.corrupt(
            f"{keys.full('altup.active_idx')} is {active}, but {keys.full('altup.num_inputs')} is"
            f" {num}"
        )
    found = {
        "rope_theta": keys.number("rope.freq_base", default=_GEMMA3N_THETA),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", default=_GEMMA3N_WINDOW_THETA),
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": keys.sizes("feed_forward_length", layers),
        "layer_types": kinds,
        "sliding_window": keys.size("attention.sliding_window"),
        "num_kv_shared_layers": layers - num_own,
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": _rows(keys, "per_layer_token_embd.weight"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", default=_GEMMA3N_CAP),
        "altup_num_inputs": num,
        "altup_active_idx": active,
        "altup_correct_scale": True,
        "laurel_rank": _rows(keys, "blk.0.laurel_l.weight"),
    }
    if (parts := _closed_gates(keys, layers)) is not None:
        found["activation_sparsity_pattern"] = parts
    return found


def _closed_gates(keys: GGUFKeys, layers: int) -> list[float] | None:
    """The part of the gates that each layer closes. The file has how many deviations above the mean
    the threshold lies: endlessly many below it where all are open."""
    key = keys.full("activation_sparsity_scale")
    scales = keys.get(key)
    if scales is None:
        return None
    if not isinstance(scales, list) or len(scales) != layers:
        keys.corrupt(f"{key} is not a list of {layers} numbers")
    for scale in scales:
        if not isinstance(scale, float) or not scale < math.inf:
            keys.corrupt(f"{key} has {str(scale)[:40]}, which is not a number of deviations")
    return [0.0 if scale == -math.inf else NormalDist().cdf(scale) for scale in scales]


def _rows(keys: GGUFKeys, name: str) -> int:
    tensor = keys.file.tensors.get(name)
    if tensor is None:
        keys.corrupt(f"the tensor {name} is missing")
    return tensor.shape[0]


def gemma4_heads(keys: GGUFKeys) -> dict[str, Any]:
    """The heads of layers with and without a window."""
    kinds = _kinds(keys, keys.num_blocks())
    full, window = (_head_dim(keys, suffix) for suffix in ("", "_swa"))
    key = "attention.head_count_kv"
    counts: dict[str, set[int]] = {_FULL: set(), _SLIDING: set()}
    for kind, count in zip(kinds, keys.sizes(key, len(kinds)), strict=True):
        counts[kind].add(count)
    if any(len(found) > 1 for found in counts.values()):
        keys.refuse(f"{keys.full(key)} differs between layers of one kind")
    (num_full,) = counts[_FULL]
    return {
        "num_attention_heads": keys.size("attention.head_count"),
        "num_key_value_heads": next(iter(counts[_SLIDING]), num_full),
        "num_global_key_value_heads": num_full,
        "head_dim": window,
        "global_head_dim": full,
    }


def gemma4(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    kinds = _kinds(keys, config["num_hidden_layers"])
    num_own = _num_own(keys, kinds)
    per_layer = keys.size("embedding_length_per_layer_input", default=0, least=0)
    sizes = _mlp_sizes(keys, len(kinds), num_own)
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": keys.size("attention.sliding_window"),
        "attention_k_eq_v": _keys_are_values(keys, config, kinds[:num_own]),
        "num_kv_shared_layers": len(kinds) - num_own,
        "rope_parameters": _ropes(keys, config["global_head_dim"]),
        "hidden_size_per_layer_input": per_layer,
        **sizes,
    }
    if per_layer:
        found["vocab_size_per_layer_input"] = _rows(keys, "per_layer_token_embd.weight")
    cap = "final_logit_softcapping"
    if keys.get(keys.full(cap), 0.0):
        found[cap] = keys.number(cap)
    if keys.get(keys.full("expert_count"), 0):
        chosen = experts(keys)
        found |= {
            "enable_moe_block": True,
            "num_experts": chosen["num_experts"],
            "top_k_experts": chosen["num_experts_per_tok"],
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        }
    return found


def _kinds(keys: GGUFKeys, layers: int) -> list[str]:
    key = "attention.sliding_window_pattern"
    pattern = keys.flags(key, layers)
    if pattern is None:
        keys.corrupt(f"{keys.full(key)} is missing or no list")
    if pattern[-1]:
        keys.refuse(f"{keys.full(key)} gives the last layer a window, which it never has")
    return [_SLIDING if item else _FULL for item in pattern]


def _head_dim(keys: GGUFKeys, suffix: str) -> int:
    """Keys, values and what is rotated of a head have one size."""
    name = f"attention.key_length{suffix}"
    size = keys.size(name)
    for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if (other := keys.size(key, default=size)) != size:
            keys.refuse(f"{keys.full(key)} {other} differs from {keys.full(name)} {size}")
    return size


def _num_own(keys: GGUFKeys, kinds: list[str], *, default: int = 0) -> int:
    """Layers, counted from the first, that store keys and values of their own."""
    key = "attention.shared_kv_layers"
    shared = keys.size(key, default=default, least=0)
    own = kinds[: max(len(kinds) - shared, 0)]
    for kind in kinds[len(own) :]:
        if kind not in own:
            keys.corrupt(
                f"{keys.full(key)} is {shared}, which leaves no layer of {kind} to share with"
            )
    return len(own)


def _keys_are_values(keys: GGUFKeys, config: dict[str, Any], own: list[str]) -> bool:
    """No key says so: layers without a window have no projection of values then."""
    full = [layer for layer, kind in enumerate(own) if kind == _FULL]
    without = [layer for layer in full if f"blk.{layer}.attn_v.weight" not in keys.file.tensors]
    if without and without != full:
        keys.corrupt(
            f"the tensor blk.{without[0]}.attn_v.weight is missing, which other layers without a"
            " window have"
        )
    if not without and config["num_global_key_value_heads"] != config["num_key_value_heads"]:
        keys.refuse(
            f"{keys.full('attention.head_count_kv')} differs between layers, and values are not"
            " the keys"
        )
    return bool(without)


def _mlp_sizes(keys: GGUFKeys, layers: int, num_own: int) -> dict[str, Any]:
    """Layers that share keys and values may have an MLP of twice the size."""
    key = "feed_forward_length"
    sizes = keys.sizes(key, layers)
    size = sizes[0]
    is_double = sizes[-1] != size
    if sizes != [size] * num_own + [size * (1 + is_double)] * (layers - num_own):
        keys.refuse(
            f"{keys.full(key)} differs between layers otherwise than by twice the size in those of"
            f" {keys.full('attention.shared_kv_layers')}"
        )
    return {"intermediate_size": size, "use_double_wide_mlp": is_double}


def _ropes(keys: GGUFKeys, head_dim: int) -> dict[str, dict[str, Any]]:
    for key in ("rope.scaling.type", "rope.scale_linear"):
        if (value := keys.get(keys.full(key), "none")) != "none":
            keys.refuse(f"{keys.full(key)} {str(value)[:40]} is not supported")
    return {
        _FULL: {
            "rope_type": "proportional",
            "rope_theta": keys.number("rope.freq_base"),
            "partial_rotary_factor": _rotated_part(keys, head_dim),
        },
        _SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa")},
    }


def _rotated_part(keys: GGUFKeys, head_dim: int) -> float:
    """The part of the frequencies that turn: their divisors are one, those of the rest endless."""
    factors = keys.file.tensors.get(ROPE_FACTORS)
    if factors is None:
        keys.corrupt(f"the tensor {ROPE_FACTORS} is missing")
    if factors.type.name != "F32" or factors.shape != (head_dim // 2,):
        keys.corrupt(f"{ROPE_FACTORS} is not {head_dim // 2} 32-bit numbers")
    values = factors.data.view(np.float32)
    turning = int(np.count_nonzero(values == 1.0))
    if not turning or np.any(values[:turning] != 1.0) or np.any(values[turning:] < _LEAST_ENDLESS):
        keys.refuse(f"{ROPE_FACTORS} is not ones and then 1e30, as this architecture has it")
    part = turning / len(values)
    # The configuration rounds the number of frequencies down: with a part too small, to one less.
    return part if int(part * head_dim // 2) == turning else math.nextafter(part, 1.0)
