"""Translate GGUF metadata into the dictionary that a Hugging Face config.json would hold.

Called by the checkpoint code with an open file. It knows the architectures termgen runs from GGUF
and their keys; what the resulting dictionary means is for `ModelConfig.from_hf`. Torch-free. A
feature that cannot be expressed is refused by name rather than dropped.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.errors import CorruptFileError, UnsupportedModelError

# architecture -> (Hugging Face class, model_type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
ROPE_FACTORS = "rope_freqs.weight"
MAX_SIZE = 1 << 31
MAX_LAYERS = 1024

# GGUF stores Llama 3's rope scaling as one factor per frequency. All Llama 3.x models share these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
# Constants of Gemma 3 for which most of its files have no key: what llama.cpp takes them to be.
_GEMMA3_THETA, _GEMMA3_WINDOW_THETA, _GEMMA3_PATTERN = 1e6, 1e4, 6
_GEMMA3_27B_LAYERS = 62
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
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0.0,),
    "swiglu_clamp_exp": (),
    "use_parallel_residual": (False,),
}
_HEAD_SIZES = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
)
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The dictionary of a config.json."""
    keys = _Keys(file)
    _check_whole(keys)
    architecture = keys.architecture
    class_name, model_type = ARCHITECTURES[architecture]
    hidden_size = keys.size("embedding_length")
    num_heads = keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", default=max(hidden_size // num_heads, 1))
    for key in _HEAD_SIZES:
        if (value := keys.size(key, default=head_dim)) != head_dim:
            keys.refuse(f"{architecture}.{key} {value} differs from the head size {head_dim}")
    if keys.get(f"{architecture}.expert_count", 0):
        keys.refuse("mixture-of-experts models are read from safetensors, not from GGUF")
    _check_arithmetic(keys)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": _vocab_size(keys, hidden_size),
        "hidden_size": hidden_size,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": keys.number("rope.freq_base", default=10000.0),
        "torch_dtype": _dtype(file),
    }
    config.update(_biases(keys))
    config.update(_gemma3(keys, config) if architecture == "gemma3" else _sliding_window(keys))
    _check_attention_scale(keys, config.get("query_pre_attn_scalar", head_dim))
    if (scaling := _rope_scaling(keys, config)) is not None:
        # For Gemma 3 this is read as the scaling of layers without a window alone.
        config["rope_scaling"] = scaling
    for name in ("bos", "eos"):
        if (token := keys.token(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The dictionary of a generation_config.json: end tokens and recommended sampling."""
    keys = _Keys(file)
    settings: dict[str, Any] = {}
    ends = [keys.token(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if eos := list(dict.fromkeys(token for token in ends if token is not None)):
        settings["eos_token_id"] = eos
    if (bos := keys.token("tokenizer.ggml.bos_token_id")) is not None:
        settings["bos_token_id"] = bos
    for key, name in _SAMPLING.items():
        value = keys.get(f"general.sampling.{key}")
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                keys.corrupt(f"general.sampling.{key} is {value!r}, which is not a number")
            settings[name] = value
    return settings


class _Keys:
    """Typed access to the metadata; a key without a dot prefix belongs to the architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = ""
        value = file.metadata.get("general.architecture")
        if not isinstance(value, str):
            self.corrupt("general.architecture is missing")
        if value not in ARCHITECTURES:
            self.refuse(
                f"the architecture {value[:64]!r} is not supported from GGUF "
                f"({', '.join(ARCHITECTURES)} are)"
            )
        self.architecture = value

    def corrupt(self, reason: str) -> NoReturn:
        raise CorruptFileError(f"{self.file.path}: {reason}")

    def refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.file.path}: {reason}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(key, default)

    def size(self, key: str, *, default: int | None = None) -> int:
        """A positive whole number; a list of one per layer is accepted when all are equal."""
        full = f"{self.architecture}.{key}"
        value = self.get(full, default)
        if value is None:
            self.corrupt(f"{full} is missing")
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                self.refuse(f"{full} differs between layers")
            value = value[0]
        if type(value) is not int or not 0 < value < MAX_SIZE:
            self.corrupt(f"{full} is {str(value)[:40]}, which is not a possible size")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        full = f"{self.architecture}.{key}"
        value = self.get(full, default)
        if value is None:
            self.corrupt(f"{full} is missing")
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.corrupt(f"{full} is {str(value)[:40]}, which is not a positive number")
        return float(value)

    def token(self, key: str) -> int | None:
        value = self.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < MAX_SIZE):
            self.corrupt(f"{key} is {str(value)[:40]}, which is not a token id")
        return value


def _check_whole(keys: _Keys) -> None:
    parts = keys.get("split.count", 1)
    if parts not in (0, 1):
        keys.refuse(f"one of {parts} parts of a split model: join them (llama-gguf-split --merge)")


def _check_arithmetic(keys: _Keys) -> None:
    """Refuse keys that change what a model computes and that would be ignored."""
    for key, neutral in _NEUTRAL.items():
        value = keys.get(f"{keys.architecture}.{key}")
        if value is not None and value not in neutral:
            keys.refuse(f"{keys.architecture}.{key} {str(value)[:40]} is not supported")


def _check_attention_scale(keys: _Keys, scalar: int) -> None:
    """scalar: the model's scores are divided by its square root."""
    if not keys.get(f"{keys.architecture}.attention.scale", 0.0):  # 0 stands for the usual one
        return
    scale = keys.number("attention.scale")
    if not math.isclose(scale, scalar**-0.5, rel_tol=1e-4):
        keys.refuse(
            f"{keys.architecture}.attention.scale {scale} is not supported, only {scalar**-0.5:.6g}"
        )


def _vocab_size(keys: _Keys, hidden_size: int) -> int:
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


def _biases(keys: _Keys) -> dict[str, bool]:
    """GGUF does not say which biases a model has: the tensors do."""
    tensors = keys.file.tensors
    qkv = "blk.0.attn_q.bias" in tensors
    output = "blk.0.attn_output.bias" in tensors
    mlp = "blk.0.ffn_up.bias" in tensors
    if keys.architecture == "qwen2":
        if output or mlp or not qkv:
            keys.refuse("a qwen2 model with other biases than on q, k and v")
        return {}
    if qkv != output:
        keys.refuse(f"a {keys.architecture} model with biases on q, k, v or the output alone")
    if keys.architecture in ("qwen3", "gemma3"):
        if mlp:
            keys.refuse(f"a {keys.architecture} model with biases in the feed-forward network")
        return {"attention_bias": qkv}
    return {"attention_bias": qkv, "mlp_bias": mlp}


def _sliding_window(keys: _Keys) -> dict[str, Any]:
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


def _gemma3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if layers > MAX_LAYERS:
        keys.corrupt(f"gemma3.block_count is {layers}, above {MAX_LAYERS}")
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
    full = "gemma3.attention.sliding_window_pattern"
    pattern = keys.get(full)
    if not isinstance(pattern, list):
        every = keys.size("attention.sliding_window_pattern", default=_GEMMA3_PATTERN)
        pattern = [bool((layer + 1) % every) for layer in range(layers)]
    elif len(pattern) != layers or not all(isinstance(item, bool) for item in pattern):
        keys.corrupt(f"{full} is not a list of {layers} truth values")
    kinds = ["sliding_attention" if item else "full_attention" for item in pattern]
    return {**found, "sliding_window": window, "layer_types": kinds}


def _rope_scaling(keys: _Keys, config: dict[str, Any]) -> dict[str, Any] | None:
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


def _yarn(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
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


def llama3_factors(head_dim: int, theta: float, factor: float) -> npt.NDArray[np.float64]:
    """The divisor of each rotary frequency under Llama 3's scaling, [head_dim / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_CONTEXT * frequencies / (2 * math.pi)
    # Few turns within the trained context: divided in full; many: left alone; a ramp between.
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _llama3(keys: _Keys, values: npt.NDArray[np.float32], theta: float) -> dict[str, Any]:
    """Recover the parameters from the factors they produced, and check that they produce them."""
    largest = float(values.max())
    factor = float(round(largest)) if math.isfinite(largest) else 0.0
    if factor > 1 and np.allclose(
        llama3_factors(2 * len(values), theta, factor), values, rtol=1e-3, atol=0
    ):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }
    keys.refuse(f"the rope factors in {ROPE_FACTORS} are not Llama 3's")
