"""The config.json of a Gemma 3 model with the keys of other families.

Used by `models.config` alone, and free of torch. A config on the hub leaves out whatever is the
class's own default, and older ones say in other keys which layers have a window and how those
rotate; here all that is filled in. What the engine does not compute is refused by name.
"""

from __future__ import annotations

from typing import Any

from termgen.engine.device.models.config_reader import ConfigReader
from termgen.errors import UnsupportedModelError

_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_BESIDE_TEXT = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")
"""What a config with a vision part may say for both parts."""
_REFUSED = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")


def gemma3_keys(read: ConfigReader) -> ConfigReader:
    """`read` or, of a model with a vision part, its text_config, with every key that is read."""
    text = read.child("text_config") or read
    shared = {key: read.get(key) for key in _BESIDE_TEXT}
    values = {**_DEFAULTS, **ConfigReader(shared).present(), **text.present()}
    text = ConfigReader(values, text.prefix)
    for key in _REFUSED:
        if values.get(key):
            raise UnsupportedModelError(
                f"config.json: {key} {values[key]!r} is not supported for Gemma 3 models"
            )
    changed = {
        "hidden_act": values["hidden_activation"],
        "layer_types": values.get("layer_types") or _layer_types(text),
        "rope_parameters": _rope_parameters(text),
    }
    return ConfigReader({**values, **changed}, text.prefix)


def _layer_types(text: ConfigReader) -> list[str]:
    """Every so many layers, the last of them sees everything."""
    every = text.integer("sliding_window_pattern")
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(text.integer("num_hidden_layers", most=1024))
    ]


def _rope_parameters(text: ConfigReader) -> dict[str, dict[str, Any]]:
    """Of both kinds of layers; older configs scale the layers that see everything alone."""
    nothing = ConfigReader({})
    ropes = text.child("rope_parameters") or nothing
    for key in ropes.present():
        if key not in ("full_attention", "sliding_attention"):
            ropes.fail(key, "is neither full_attention nor sliding_attention")
    full = ropes.child("full_attention") or text.child("rope_scaling") or nothing
    window = ropes.child("sliding_attention") or nothing
    theta = text.number("rope_theta", default=1e6)
    window_theta = text.number("rope_local_base_freq", default=1e4)
    return {
        "full_attention": {"rope_theta": theta, **full.present()},
        "sliding_attention": {"rope_theta": window_theta, **window.present()},
    }
