"""The keys of a config.json as one reader expects them, whatever a family calls them.

What a file leaves out gets the value that transformers' class has for it, keys of a family's own
become the common ones, and keys that contradict each other are errors that name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.gemma3n_config import gemma3_ropes, gemma3n_keys
from termgen.engine.device.config.gemma4_config import gemma4_keys
from termgen.engine.device.config.llama4_config import llama4_keys
from termgen.engine.device.config.rope_config import rope_keys
from termgen.errors import UnsupportedModelError

TORCH_DTYPES = ("float32", "bfloat16", "float16")
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "sliding_window": 4096},
    "Qwen3NextForCausalLM": {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "norm_topk_prob": True,
    },
    "GptOssForCausalLM": {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "torch_dtype": "bfloat16",  # files in four bits do not say what their other weights are in
    },
}
"""Values of keys that a config.json leaves out, where transformers' class for the architecture has
another default than most. A key that is null keeps that meaning."""
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS_OTHER_NAMES = {
    "experts_per_token": "num_experts_per_tok",
    "num_experts": "num_local_experts",
}
"""Keys that some config.json of the family have besides those that count."""
_GEMMA3_DEFAULTS = {
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
_GEMMA2_DEFAULTS = {
    **_GEMMA3_DEFAULTS,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_MUSE_DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "bos_token_id": 200000,
    "eos_token_id": 200001,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.19611613513818404,
    "qk_scale_factor": 3.87,
}
_MUSE_PERIOD = 4
"""Every so many layers, counted from the last, one has no window and no rotation."""
_MUSE_NUMBERS = (
    "rms_norm_eps",
    "post_norm_eps",
    "final_logit_softcapping",
    "output_multiplier",
    "qk_scale_factor",
)
"""Keys that transformers refuses to have as nulls."""
_QWEN3_5_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "linear_conv_kernel_dim": 4}
_QWEN3_5_FIXED = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
"""What the family's arithmetic is, whether a config.json says so or not."""
_QWEN3_NEXT_FIXED = {"linear_conv_kernel_dim": 4, "hidden_act": "silu"}
_SHARED_KEYS = (
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype"),
    *("quantization_config", "compression_config"),
)
"""Keys that a config with a vision part may hold for both parts."""
_GEMMA2_NULLS = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
"""Keys whose null is a value of its own: none, whatever the class fills in for a key left out."""
_GEMMA3_REFUSED = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
)


def common_keys(architecture: str, config: Mapping[str, Any]) -> ConfigReader:
    """The config of this architecture. Raises UnsupportedModelError or CorruptFileError."""
    read = ConfigReader({**_CLASS_DEFAULTS.get(architecture, {}), **config})
    if architecture.startswith("Gemma3n"):
        return gemma3n_keys(read)
    if architecture.startswith("Gemma3"):
        return _gemma3_keys(read)
    if architecture.startswith("Gemma4"):
        return gemma4_keys(read)
    if architecture.startswith("Llama4"):
        return llama4_keys(read)
    if architecture == "Gemma2ForCausalLM":
        return _gemma2_keys(read)
    if architecture == "MuseGlimmerForConditionalGeneration":
        return _muse_keys(read)
    if architecture == "GptOssForCausalLM":
        return _gpt_oss_keys(read, config)
    if architecture.startswith("Qwen3_5"):
        return _qwen3_5_keys(read, has_experts=architecture.startswith("Qwen3_5Moe"))
    if architecture == "Qwen3NextForCausalLM":
        _check_delta_nets(read, _QWEN3_NEXT_FIXED)
    return read


def _check_delta_nets(read: ConfigReader, fixed: Mapping[str, Any]) -> None:
    """Refuse keys that ask for other arithmetic than the family's."""
    for key, meant in fixed.items():
        if read.get(key) not in (None, meant):
            raise UnsupportedModelError(
                f"config.json: {key} {read.get(key)!r} is not supported for this architecture,"
                f" only {meant!r}"
            )
    if rope_keys(read).get("rope_theta") is None and read.get("rope_theta") is None:
        read.fail("rope_theta", "is missing")  # that of the class is not the published models'


def _qwen3_5_keys(read: ConfigReader, *, has_experts: bool) -> ConfigReader:
    """The text model's config: of a model with a vision part, its text_config. Keys that ask for
    other arithmetic than the family's are refused."""
    text = read.child("text_config") or read
    shared = {key: read.get(key) for key in (*_SHARED_KEYS, "tie_word_embeddings")}
    defaults = {**_QWEN3_5_DEFAULTS, **({"num_key_value_heads": 2} if has_experts else {})}
    values = {**defaults, **ConfigReader(shared).present(), **text.present()}
    if shared["tie_word_embeddings"] not in (None, values.get("tie_word_embeddings")):
        read.fail(
            "tie_word_embeddings",
            f"is {shared['tie_word_embeddings']!r}, which that of text_config contradicts",
        )
    text = ConfigReader(values, text.prefix)
    _check_delta_nets(text, _QWEN3_5_FIXED)
    if has_experts:  # no layer has a plain MLP
        values["intermediate_size"] = text.integer("moe_intermediate_size")
    return text


def _gemma2_keys(read: ConfigReader) -> ConfigReader:
    """The config in the keys of other families, with what the class fills in."""
    nulls = {key: None for key in _GEMMA2_NULLS if read.has(key) and read.get(key) is None}
    values = {**_GEMMA2_DEFAULTS, **read.present(), **nulls}
    if values.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "config.json: use_bidirectional_attention is not supported for Gemma 2 models"
        )
    activation = values["hidden_activation"]
    if values.get("hidden_act", activation) != activation:
        read.fail("hidden_act", f"is not hidden_activation {activation!r}, which transformers uses")
    types = values.get("layer_types") or _taking_turns(ConfigReader(values))
    return ConfigReader({**values, "hidden_act": activation, "layer_types": types}, read.prefix)


def _taking_turns(read: ConfigReader) -> list[str]:
    """Layer types where every second layer has no window."""
    return [
        "full_attention" if layer % 2 else "sliding_attention"
        for layer in range(read.integer("num_hidden_layers", most=1024))
    ]


def _gpt_oss_keys(read: ConfigReader, given: Mapping[str, Any]) -> ConfigReader:
    """The config with what the class fills in; `given` is without that. Keys that say something
    else than those that count are refused."""
    defaults = _CLASS_DEFAULTS["GptOssForCausalLM"]
    nulls = {key: None for key in ("sliding_window",) if key in given and given[key] is None}
    values = {**defaults, **read.present(), **nulls}
    for other, key in _GPT_OSS_OTHER_NAMES.items():
        if given.get(other) not in (None, values[key]):
            read.fail(other, f"is {given[other]!r}, but {key} is {values[key]!r}")
    if values.get("hidden_act", "silu") != "silu":
        read.fail("hidden_act", f"is {values['hidden_act']!r}: experts of this family clamp a silu")
    if read.child("rope_parameters") is None and read.child("rope_scaling") is None:
        values["rope_parameters"] = _GPT_OSS_ROPE
    types = values.get("layer_types") or _taking_turns(ConfigReader(values))
    return ConfigReader({**values, "layer_types": types}, read.prefix)


def _muse_keys(read: ConfigReader) -> ConfigReader:
    """The text_config in the keys of other families, with what the class fills in. Keys that say
    something else than those that count are refused."""
    text = read.child("text_config") or ConfigReader({}, "text_config")
    for key in _MUSE_NUMBERS:
        if text.has(key) and text.get(key) is None:
            text.fail(key, "must be a number, not null")
    shared = ConfigReader({key: read.get(key) for key in _SHARED_KEYS}).present()
    nulls = {key: None for key in ("sliding_window",) if text.has(key) and text.get(key) is None}
    values = {**_MUSE_DEFAULTS, **shared, **text.present(), **nulls}
    activation = values["hidden_activation"]
    if values.get("hidden_act", activation) != activation:
        text.fail("hidden_act", f"is not hidden_activation {activation!r}, which transformers uses")
    tied = read.flag("tie_word_embeddings", default=False)
    if text.flag("tie_word_embeddings", default=tied) != tied:
        text.fail("tie_word_embeddings", f"is not what config.json has outside it, {tied}")
    text = ConfigReader(values, text.prefix)
    num_layers = text.integer("num_hidden_layers", most=1024)
    full = _muse_full_layers(num_layers)
    types = ["full_attention" if i in full else "sliding_attention" for i in range(num_layers)]
    changed = {
        "hidden_act": activation,
        "tie_word_embeddings": tied,
        "layer_types": values.get("layer_types") or types,
    }
    return ConfigReader({**values, **changed}, text.prefix)


def _muse_full_layers(num_layers: int) -> frozenset[int]:
    return frozenset(range(num_layers - 1, -1, -_MUSE_PERIOD))


def muse_unrotated(read: ConfigReader, num_layers: int, theta: float) -> frozenset[int]:
    """Layers whose own theta is 0; the value of the others counts nowhere, so it has to agree."""
    thetas = read.get("layer_rope_theta")
    if thetas is None:
        return _muse_full_layers(num_layers)
    if not isinstance(thetas, list | tuple) or len(thetas) != num_layers:
        read.fail("layer_rope_theta", f"must be a list of {num_layers} numbers")
    for layer, value in enumerate(thetas):
        if not isinstance(value, int | float) or isinstance(value, bool):
            read.fail("layer_rope_theta", f"must hold numbers, not {value!r}")
        if value not in (0, theta):
            read.fail(
                "layer_rope_theta",
                f"is {value} at layer {layer}, but layers rotate by rope_theta {theta} or, at 0,"
                " not at all",
            )
    return frozenset(layer for layer, value in enumerate(thetas) if not value)


def _gemma3_keys(read: ConfigReader) -> ConfigReader:
    """The config in the keys of other families: of a model with a vision part, its text_config.

    A config on the hub leaves out whatever is the class's own default, and older ones say in other
    keys which layers have a window and how those rotate; here all that is filled in. What the
    engine does not compute is refused by name.
    """
    text = read.child("text_config") or read
    shared = {key: read.get(key) for key in _SHARED_KEYS}
    values = {**_GEMMA3_DEFAULTS, **ConfigReader(shared).present(), **text.present()}
    text = ConfigReader(values, text.prefix)
    for key in _GEMMA3_REFUSED:
        if values.get(key):
            raise UnsupportedModelError(
                f"config.json: {key} {values[key]!r} is not supported for Gemma 3 models"
            )
    changed = {
        "hidden_act": values["hidden_activation"],
        "layer_types": values.get("layer_types") or _gemma3_layer_types(text),
        "rope_parameters": gemma3_ropes(text),
    }
    return ConfigReader({**values, **changed}, text.prefix)


def _gemma3_layer_types(text: ConfigReader) -> list[str]:
    """The last layer of each group of `sliding_window_pattern` sees everything."""
    every = text.integer("sliding_window_pattern")
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(text.integer("num_hidden_layers", most=1024))
    ]


def read_torch_dtype(read: ConfigReader) -> str:
    name = read.text("dtype", default=read.text("torch_dtype", default="float32"))
    name = name.removeprefix("torch.")
    if name not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise UnsupportedModelError(
            f"config.json: torch_dtype {name!r} is not supported; supported are {known}"
        )
    return name
