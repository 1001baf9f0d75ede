"""Translate GGUF metadata into the dictionary that a Hugging Face config.json would hold.

Called by the checkpoint code with an open file. It knows the architectures termgen runs from GGUF
and their keys; what the resulting dictionary means is for `ModelConfig.from_hf`. Torch-free. A
feature that cannot be expressed is refused by name rather than dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from termgen.engine.device.loader.gguf_families import (
    DELTA_NETS,
    EXPERTS,
    gpt_oss,
    llama4,
    num_draft_layers,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from termgen.engine.device.loader.gguf_gemma import gemma3n, gemma4, gemma4_heads
from termgen.engine.device.loader.gguf_keys import ARCHITECTURES, ROPE_FACTORS, GGUFKeys
from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.vocabulary.sampling_params import RECOMMENDED

ENDS = {"muse-glimmer": ("eos", "eot"), "gpt-oss": ("eos",)}
"""Tokens that end an answer of architectures whose answers have several messages, the end of one of
which does not end the answer."""
_ALL_ENDS = ("eos", "eot", "eom")

# GGUF stores Llama 3's rope scaling as one factor per frequency. All Llama 3.x models share these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_LLAMA4_HIGH = 1.0
# Constants of Gemma 3 for which most of its files have no key: what llama.cpp takes them to be.
_GEMMA3_THETA, _GEMMA3_WINDOW_THETA, _GEMMA3_PATTERN = 1e6, 1e4, 6
_GEMMA3_27B_LAYERS = 62
# The same of Gemma 2. Its window is 4096 where no key says another, and its caps are these.
_GEMMA2_WINDOW, _GEMMA2_SCORES_CAP, _GEMMA2_LOGITS_CAP = 4096, 50.0, 30.0
_GEMMA2_27B_LAYERS = 46
# The same of Muse Glimmer; the epsilon of its post norms has no key at all.
_MUSE_PATTERN, _MUSE_LOGITS_CAP, _MUSE_POST_NORM_EPS = 4, 30.0, 1e-8
_MUSE_OUTSIDE = ("architectures", "model_type", "tie_word_embeddings", "torch_dtype")
"""Keys of its config.json that are not in text_config."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Keys of other architectures' arithmetic, and the values with which they change nothing. A file of
# a supported architecture that has one means another model than termgen would compute.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "activation_sparsity_scale": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.relative_buckets_count": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    # 1 is a softmax over all experts, 3 one over those chosen: the same where the weights of those
    # chosen are scaled to add up to one, as they are in all supported architectures.
    "expert_gating_func": (0, 1, 3),
    "expert_group_count": (0, 1),
    "expert_group_scale": (0.0, 1.0),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "experts_per_group": (0,),
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0.0,),
    "ssm.dt_b_c_rms": (False,),
    "swiglu_clamp_exp": (),
    "use_parallel_residual": (False,),
}
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_DELTA_NET_KEYS = ("nextn_predict_layers", "rope.dimension_sections")
_READ = {
    "gemma2": _SOFT_CAPS,
    "gemma3n": (
        "activation_sparsity_scale",
        "attention.shared_kv_layers",
        "final_logit_softcapping",
    ),
    "llama4": ("expert_gating_func", "interleave_moe_layer_step"),
    "gemma4": ("attention.shared_kv_layers", "final_logit_softcapping"),
    "muse-glimmer": ("final_logit_softcapping", "logit_scale"),
    **dict.fromkeys(DELTA_NETS, _DELTA_NET_KEYS),
    **dict.fromkeys(("qwen35moe", "qwen3next"), (*_DELTA_NET_KEYS, "expert_shared_count")),
}
"""Keys among them that belong to a supported architecture after all."""
_OWN_SIZES = frozenset({"qwen35moe", "qwen3next", "gpt-oss", "gemma3n", "gemma4", "llama4"})
"""Architectures whose MLP, if they have any, is not of the one size in `feed_forward_length`."""
_UNSCALED = frozenset({"gemma3n", "gemma4"})
"""Architectures whose scores of attention have no factor."""
_HEAD_SIZES = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The dictionary of a config.json."""
    keys = GGUFKeys(file)
    _check_whole(keys)
    architecture = keys.architecture
    class_name, model_type = ARCHITECTURES[architecture]
    hidden_size = keys.size("embedding_length")
    heads = gemma4_heads(keys) if architecture == "gemma4" else _heads(keys, hidden_size)
    if architecture not in EXPERTS and keys.get(f"{architecture}.expert_count", 0):
        keys.refuse(f"{architecture} models with experts are read from safetensors, not from GGUF")
    _check_arithmetic(keys)
    config: dict[str, Any] = {}
    if architecture not in _OWN_SIZES:
        config["intermediate_size"] = keys.size("feed_forward_length")
    config |= {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": _vocab_size(keys, hidden_size),
        "hidden_size": hidden_size,
        "num_hidden_layers": keys.num_blocks() - num_draft_layers(keys),
        **heads,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": keys.number("rope.freq_base", default=10000.0),
        "torch_dtype": _dtype(file),
    }
    config.update(_biases(keys, config["num_hidden_layers"]))
    special = _FAMILIES.get(architecture)
    config.update(special(keys, config) if special is not None else _sliding_window(keys))
    scalar = 1 if architecture in _UNSCALED else config["head_dim"]
    _check_attention_scale(keys, config.get("query_pre_attn_scalar", scalar))
    scaling = None if architecture == "gemma4" else _rope_scaling(keys, config)
    if architecture == "gpt-oss":  # where config.json has nothing, the family's own scaling counts
        scaling = {"truncate": False, **(scaling or {"rope_type": "default"})}
    if scaling is not None:
        # For Gemma 3 this is read as the scaling of layers without a window alone.
        config["rope_scaling"] = scaling
    for name in ("bos", "eos"):
        if (token := keys.token(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    if architecture == "muse-glimmer":
        outside = {key: config.pop(key) for key in _MUSE_OUTSIDE}
        return {**outside, "text_config": config}
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The dictionary of a generation_config.json: end tokens and recommended sampling."""
    keys = GGUFKeys(file)
    settings: dict[str, Any] = {}
    names = ENDS.get(keys.architecture, _ALL_ENDS)
    ends = [keys.token(f"tokenizer.ggml.{name}_token_id") for name in names]
    if eos := list(dict.fromkeys(token for token in ends if token is not None)):
        settings["eos_token_id"] = eos
    if (bos := keys.token("tokenizer.ggml.bos_token_id")) is not None:
        settings["bos_token_id"] = bos
    for name, key in RECOMMENDED.items():
        value = keys.get(f"general.sampling.{key}")
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                keys.corrupt(f"general.sampling.{key} is {value!r}, which is not a number")
            settings[name] = value
    return settings


def _heads(keys: GGUFKeys, hidden_size: int) -> dict[str, Any]:
    num_heads = keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", default=max(hidden_size // num_heads, 1))
    for key in _HEAD_SIZES:
        if keys.architecture in DELTA_NETS and key == "rope.dimension_count":
            continue
        if (value := keys.size(key, default=head_dim)) != head_dim:
            keys.refuse(f"{keys.full(key)} {value} differs from the head size {head_dim}")
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
    }


def _check_whole(keys: GGUFKeys) -> None:
    parts = keys.get("split.count", 1)
    if parts not in (0, 1):
        keys.refuse(f"one of {parts} parts of a split model: join them (llama-gguf-split --merge)")


def _check_arithmetic(keys: GGUFKeys) -> None:
    """Refuse keys that change what a model computes and that would be ignored."""
    for key, neutral in _NEUTRAL.items():
        value = keys.get(f"{keys.architecture}.{key}")
        is_read = key in _READ.get(keys.architecture, ())
        if value is not None and value not in neutral and not is_read:
            keys.refuse(f"{keys.architecture}.{key} {str(value)[:40]} is not supported")


def _check_attention_scale(keys: GGUFKeys, scalar: int) -> None:
    """scalar: the model's scores are divided by its square root."""
    if not keys.get(f"{keys.architecture}.attention.scale", 0.0):  # 0 stands for the usual one
        return
    scale = keys.number("attention.scale")
    if not math.isclose(scale, scalar**-0.5, rel_tol=1e-4):
        keys.refuse(
            f"{keys.architecture}.attention.scale {scale} is not supported, only {scalar**-0.5:.6g}"
        )


def _vocab_size(keys: GGUFKeys, hidden_size: int) -> int:
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None:
        keys.corrupt("the tensor token_embd.weight is missing")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        keys.corrupt(
            f"token_embd.weight is {list(embedding.shape)}, but embedding_length is {hidden_size}"
        )
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """The type most of the file is in. Quantised weights stand for what models are trained in."""
    by_type: dict[str, int] = {}
    for tensor in file.tensors.values():
        by_type[tensor.type.name] = by_type.get(tensor.type.name, 0) + tensor.nbytes
    return _DTYPES.get(max(by_type, key=lambda name: by_type[name]), "bfloat16")


def _biases(keys: GGUFKeys, layers: int) -> dict[str, bool]:
    """GGUF does not say which biases a model has: the tensors do."""
    tensors = keys.file.tensors
    first = next((i for i in range(layers) if f"blk.{i}.attn_q.weight" in tensors), 0)
    qkv = f"blk.{first}.attn_q.bias" in tensors
    output = f"blk.{first}.attn_output.bias" in tensors
    mlp = "blk.0.ffn_up.bias" in tensors
    if keys.architecture == "qwen2":
        if output or mlp or not qkv:
            keys.refuse("a qwen2 model with other biases than on q, k and v")
        return {}
    if qkv != output:
        keys.refuse(f"a {keys.architecture} model with biases on q, k, v or the output alone")
    if keys.architecture != "llama":
        if mlp:
            keys.refuse(f"a {keys.architecture} model with biases in the feed-forward network")
        return {"attention_bias": qkv}
    return {"attention_bias": qkv, "mlp_bias": mlp}


def _sliding_window(keys: GGUFKeys) -> dict[str, Any]:
    window = keys.get(f"{keys.architecture}.attention.sliding_window", 0)
    if not window:
        return {}
    window = keys.size("attention.sliding_window")
    if keys.architecture == "llama":
        # Mistral ships as llama; a window is all that sets it apart.
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _gemma2(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    # No key says by what scores are divided: the 27B model alone has another value than the others.
    by_hidden_size = config["num_hidden_layers"] == _GEMMA2_27B_LAYERS
    scalar = config["head_dim"]
    if by_hidden_size:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.size("attention.sliding_window", default=_GEMMA2_WINDOW),
        "attn_logit_softcapping": keys.number(_SOFT_CAPS[0], default=_GEMMA2_SCORES_CAP),
        "final_logit_softcapping": keys.number(_SOFT_CAPS[1], default=_GEMMA2_LOGITS_CAP),
    }


def _gemma3(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    # No key says by what scores are divided: the 27B model alone has another value than the others.
    by_hidden_size = layers == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // heads if by_hidden_size else config["head_dim"]
    theta = keys.number("rope.freq_base", default=_GEMMA3_THETA)
    window_theta = keys.number("rope.freq_base_swa", default=_GEMMA3_WINDOW_THETA)
    found: dict[str, Any] = {
        "rope_theta": theta,
        "rope_local_base_freq": window_theta,
        "query_pre_attn_scalar": scalar,
    }
    if not keys.get("gemma3.attention.sliding_window", 0):
        return {**found, "layer_types": ["full_attention"] * layers}
    window = keys.size("attention.sliding_window")
    kinds = keys.window_layers(layers, _GEMMA3_PATTERN)
    return {**found, "sliding_window": window, "layer_types": kinds}


def _muse(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    theta = keys.number("rope.freq_base_swa", default=config["rope_theta"])
    kinds = keys.window_layers(layers, _MUSE_PATTERN)
    if _weight_of_norms(keys, "k", layers) != 1.0:
        keys.refuse("the norms of k have weights, which this architecture's have not")
    return {
        "rope_theta": theta,
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": kinds,
        # Layers that see everything do not rotate.
        "layer_rope_theta": [0 if kind == "full_attention" else theta for kind in kinds],
        "final_logit_softcapping": keys.number(_SOFT_CAPS[1], default=_MUSE_LOGITS_CAP),
        "output_multiplier": keys.number("logit_scale"),
        "post_norm_eps": _MUSE_POST_NORM_EPS,
        "qk_scale_factor": _weight_of_norms(keys, "q", layers),
    }


def _weight_of_norms(keys: GGUFKeys, part: str, layers: int) -> float:
    """The one number in the norms of q or k, which conversion makes up to hold the factor of q."""
    found: set[float] = set()
    for layer in range(layers):
        name = f"blk.{layer}.attn_{part}_norm.weight"
        tensor = keys.file.tensors.get(name)
        if tensor is None or tensor.type.name != "F32":
            keys.corrupt(f"the tensor {name} is missing or not in F32")
        found |= set(np.unique(tensor.data.view(np.float32)).tolist())
    if len(found) != 1:
        keys.refuse(f"the norms of {part} have weights, which this architecture's have not")
    return found.pop()


def _rope_scaling(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any] | None:
    prefix = f"{keys.architecture}.rope.scaling"
    kind = keys.get(f"{prefix}.type", "none")
    factors = keys.file.tensors.get(ROPE_FACTORS)
    if f"{keys.architecture}.rope.scale_linear" in keys.file.metadata and kind == "none":
        factor = keys.number("rope.scale_linear")
        scaling = None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    elif kind == "none":
        scaling = None
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    elif kind == "yarn":
        scaling = _yarn(keys, config)
    else:
        keys.refuse(f"rope scaling of type {str(kind)[:40]!r} is not supported")
    if factors is None:
        return scaling
    if factors.type.name != "F32" or factors.shape != (config["head_dim"] // 2,):
        keys.corrupt(f"{ROPE_FACTORS} is not {config['head_dim'] // 2} 32-bit numbers")
    values = factors.data.view(np.float32)
    if np.all(values == 1.0):
        return scaling
    if scaling is not None:
        keys.refuse(f"rope scaling of type {kind} together with {ROPE_FACTORS} is not supported")
    return _llama3(keys, values, config["rope_theta"])


def _yarn(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    factor = keys.number("rope.scaling.factor")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size(
            "rope.scaling.original_context_length", default=config["max_position_embeddings"]
        ),
    }
    for key in ("beta_fast", "beta_slow"):
        full = f"rope.scaling.yarn_{key}"
        if f"{keys.architecture}.{full}" in keys.file.metadata:
            scaling[key] = keys.number(full)
    for key, neutral in (("yarn_ext_factor", (1.0, -1.0)), ("yarn_log_multiplier", (0.0,))):
        value = keys.get(f"{keys.architecture}.rope.scaling.{key}", neutral[0])
        if value not in neutral:
            keys.refuse(f"{keys.architecture}.rope.scaling.{key} {value} is not supported")
    attention = 1.0
    for key in ("attn_factor", "yarn_attn_factor"):
        attention *= keys.number(f"rope.scaling.{key}", default=1.0)
    if attention != 1.0:
        # GGUF multiplies YaRN's own attention factor; config.json replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def llama3_factors(
    head_dim: int, theta: float, factor: float, high: float = _LLAMA3_HIGH
) -> npt.NDArray[np.float64]:
    """The divisor of each rotary frequency under Llama 3's scaling, [head_dim / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_CONTEXT * frequencies / (2 * math.pi)
    # Few turns within the trained context: divided in full; many: left alone; a ramp between.
    if high == _LLAMA3_LOW:
        smooth = np.where(turns < high, 0.0, 1.0)
    else:
        smooth = np.clip((turns - _LLAMA3_LOW) / (high - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _llama3(keys: GGUFKeys, values: npt.NDArray[np.float32], theta: float) -> dict[str, Any]:
    """Recover the parameters from the factors they produced, and check that they produce them."""
    largest = float(values.max())
    factor = float(round(largest)) if math.isfinite(largest) else 0.0
    for high in (_LLAMA3_HIGH, _LLAMA4_HIGH):
        if factor > 1 and np.allclose(
            llama3_factors(2 * len(values), theta, factor, high), values, rtol=1e-3, atol=0
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": high,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    keys.refuse(f"the rope factors in {ROPE_FACTORS} are not Llama 3's")


_FAMILIES: dict[str, Callable[[GGUFKeys, dict[str, Any]], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "muse-glimmer": _muse,
    "qwen3moe": lambda keys, _: {**_sliding_window(keys), **qwen3_moe(keys)},
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5_moe,
    "qwen3next": qwen3_next,
    "gpt-oss": gpt_oss,
    "llama4": llama4,
}
