"""What a config.json says of Llama 4: which layers rotate, see chunks, and have experts.

Older files name neither the kinds of layers nor the layers with experts, but give intervals; here
all that is filled in. transformers' class has the intervals, too, when a list counts in their
place, so they contradict no list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.experts_config import ExpertNames, MoeConfig, expert_numbers
from termgen.engine.device.config.rope_config import rope_keys
from termgen.errors import UnsupportedModelError

LLAMA4_BLOCK = "feed_forward"
"""The part of a layer that holds its MLP or its experts, in a checkpoint."""
_DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
_SHARED_KEYS = (
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings"),
    *("quantization_config", "compression_config"),
)
"""Keys that a config with a vision part may hold for both parts."""
_FULL, _CHUNKED = "full_attention", "chunked_attention"
_NAMES = ExpertNames(
    block=LLAMA4_BLOCK, gate="gate_proj", up="up_proj", down="down_proj", router="router"
)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Factor of the queries of layers that do not rotate: 1 + scale * log(1 + n) for a token that
    is the last of n whole intervals or comes after it, but before the next."""

    interval: float
    scale: float


def llama4_keys(read: ConfigReader) -> ConfigReader:
    """The text model's config, in the keys of other families where these have some for the same.
    Keys that say something else than those that count are refused."""
    text = read.child("text_config") or read
    tied = read.get("tie_word_embeddings")
    if text.get("tie_word_embeddings") not in (None, tied) and tied is not None:
        text.fail("tie_word_embeddings", f"is not what config.json has outside it, {tied!r}")
    if text.has("attention_chunk_size") and text.get("attention_chunk_size") is None:
        text.fail("attention_chunk_size", "must be a number, not null")
    shared = ConfigReader({key: read.get(key) for key in _SHARED_KEYS}).present()
    values: dict[str, Any] = {**_DEFAULTS, **shared, **text.present()}
    text = ConfigReader(values, text.prefix)
    rope = rope_keys(text)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "yarn":  # its factor of q and k would have to come ahead of their norm
        raise UnsupportedModelError(
            "config.json: rope_type 'yarn' is not supported for Llama 4 models"
        )
    num_layers = text.integer("num_hidden_layers", most=1024)
    rotates = _rotating_layers(text, num_layers)
    changed = {
        "no_rope_layers": rotates,
        "layer_types": _layer_types(text, rotates),
        "moe_layers": _sparse_layers(text, num_layers),
        "intermediate_size": text.integer("intermediate_size_mlp"),
        "moe_intermediate_size": text.integer("intermediate_size"),
    }
    return ConfigReader({**values, **changed}, text.prefix)


def _layer_types(text: ConfigReader, rotates: list[bool]) -> list[str]:
    """Chunks where layers rotate, if nothing else is said; in small models, these see all."""
    given = text.get("layer_types")
    if given is None:
        return [_CHUNKED if rotating else _FULL for rotating in rotates]
    if not isinstance(given, list | tuple) or len(given) != len(rotates):
        text.fail("layer_types", f"must be a list of {len(rotates)} names")
    for layer, (name, rotating) in enumerate(zip(given, rotates, strict=True)):
        if name not in (_FULL, _CHUNKED):
            raise UnsupportedModelError(f"config.json: layer_types has {name!r}, not supported")
        if name == _CHUNKED and not rotating:
            text.fail(
                "layer_types",
                f"has {name} at layer {layer}, which does not rotate by no_rope_layers",
            )
    return list(given)


def _rotating_layers(text: ConfigReader, num_layers: int) -> list[bool]:
    """`no_rope_layers` has a 1, of all numbers, for a layer that rotates."""
    given = text.get("no_rope_layers")
    if not given:
        interval = text.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list | tuple) or len(given) != num_layers:
        text.fail("no_rope_layers", f"must be a list of {num_layers} numbers")
    for value in given:
        if value not in (0, 1):
            text.fail("no_rope_layers", f"must hold 0 and 1, not {value!r}")
    return [bool(value) for value in given]


def _sparse_layers(text: ConfigReader, num_layers: int) -> list[int]:
    given = text.get("moe_layers")
    if given is None:
        step = text.integer("interleave_moe_layer_step")
        return list(range(step - 1, num_layers, step))
    if not isinstance(given, list | tuple):
        text.fail("moe_layers", "must be a list of layers")
    for layer in given:
        if type(layer) is not int or not 0 <= layer < num_layers:
            text.fail("moe_layers", f"must hold layers from 0 to {num_layers - 1}, not {layer!r}")
    return sorted(set(given))


def llama4_unrotated(read: ConfigReader) -> frozenset[int]:
    """The layers that do not rotate. read: what `llama4_keys` returned, as below."""
    return frozenset(i for i, rotates in enumerate(read.get("no_rope_layers")) if not rotates)


def llama4_temperature(read: ConfigReader) -> Temperature | None:
    is_tuned = read.get("attn_temperature_tuning")
    if is_tuned is not None and type(is_tuned) not in (bool, int):  # 4 in the first files
        read.fail("attn_temperature_tuning", f"must be true or false, not {is_tuned!r}")
    if is_tuned is not None and not is_tuned:
        return None
    return Temperature(read.number("floor_scale", above=0.0), read.number("attn_scale"))


def llama4_experts(read: ConfigReader, num_layers: int) -> MoeConfig:
    num_experts, chosen = expert_numbers(read, "num_local_experts")
    inner = read.integer("moe_intermediate_size")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=inner,
        norm_topk_prob=False,
        sparse_layers=frozenset(read.get("moe_layers")),
        names=_NAMES,
        shared_intermediate_size=inner,
        weighs_inputs=True,
        is_transposed=True,
    )
