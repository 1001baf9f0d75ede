"""What a model is, read from its config.json. Frozen, and free of torch.

`ModelConfig.from_hf` takes the dictionary of a Hugging Face config (both the older form with
`rope_theta` and `rope_scaling`, and the newer one with `rope_parameters`); GGUF metadata is
translated to the same form first, so there is one reader. What differs between families in the
config (defaults, biases, windows) is in `_FAMILIES`; what differs in the arithmetic is in the
family's model class. A key that would change the arithmetic and is not understood is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from termgen.engine.models.config_reader import ConfigReader
from termgen.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
HIDDEN_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
TORCH_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields after `partial_rotary_factor` belong to scalings."""

    theta: float = 10000.0
    type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """What cos and sin are multiplied with: given, or worked out the way YaRN says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSource:
    """What a model that runs through transformers' code is built from."""

    raw: Mapping[str, Any]
    """config.json as it is."""
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model and everything its arithmetic depends on."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    layer_windows: tuple[int | None, ...]
    """Per layer, how many of the last tokens (itself included) a token sees; None: all."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    transformers: TransformersSource | None = None
    """Set when transformers' code runs the model. Of its arithmetic nothing is known here then: the
    fields from `intermediate_size` to `qk_norm` that attention and the cache do not need are empty.
    """

    @property
    def implementation(self) -> str:
        """Whose code runs the model: one of config.MODEL_IMPLS."""
        return "termgen" if self.transformers is None else "transformers"

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices; norms and biases are too few to matter."""
        if self.transformers is not None:
            return self.transformers.num_parameters
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # of q and the output, k and v
        layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a config.json. Raises UnsupportedModelError or CorruptFileError naming the key."""
        read = ConfigReader(config)
        architecture = _architecture(read)
        family = _FAMILIES[architecture](read)
        reject_foreign_quantization(read)
        hidden_size = read.integer("hidden_size")
        num_layers = read.integer("num_hidden_layers", most=1024)
        num_heads = read.integer("num_attention_heads")
        num_kv_heads = read.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            read.fail("num_key_value_heads", f"does not divide num_attention_heads {num_heads}")
        head_dim = _head_dim(read, hidden_size, num_heads, family.head_dim)
        max_positions = read.integer("max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=read.number("rms_norm_eps", default=1e-6, above=0.0),
            hidden_act=_hidden_act(read),
            tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
            rope=_rope(read, head_dim, max_positions),
            qkv_bias=family.qkv_bias,
            o_bias=family.o_bias,
            mlp_bias=family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_window=family.sliding_window,
            layer_windows=_layer_windows(read, family, num_layers),
            bos_token_id=read.token_id("bos_token_id"),
            eos_token_ids=read.token_ids("eos_token_id"),
            torch_dtype=read_torch_dtype(read),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a family's config says beyond the common keys."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Head size when the config has none; None: hidden_size / num_attention_heads."""
    sliding_window: int | None = None
    first_window_layer: int = 0
    has_layer_types: bool = False


def _llama(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias", default=False),
    )


def _mistral(read: ConfigReader) -> _Family:
    return _Family(sliding_window=read.optional_integer("sliding_window"))


def _qwen_window(read: ConfigReader) -> int | None:
    if not read.flag("use_sliding_window", default=False):
        return None
    return read.optional_integer("sliding_window")


def _qwen2(read: ConfigReader) -> _Family:
    return _Family(
        qkv_bias=True,
        sliding_window=_qwen_window(read),
        first_window_layer=read.integer("max_window_layers", default=28, least=0),
        has_layer_types=True,
    )


def _qwen3(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        head_dim=128,
        sliding_window=_qwen_window(read),
        first_window_layer=read.integer("max_window_layers", default=28, least=0),
        has_layer_types=True,
    )


_FAMILIES: dict[str, Callable[[ConfigReader], _Family]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family that termgen has code of its own for."""
    return architecture_name(ConfigReader(config)) in _FAMILIES


def unsupported_architecture(architecture: str) -> UnsupportedModelError:
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    return UnsupportedModelError(
        f"architecture {architecture!r} is not supported; supported are {known}"
    )


def architecture_name(read: ConfigReader) -> str:
    names = read.get("architectures")
    if not isinstance(names, list | tuple) or not names or not isinstance(names[0], str):
        read.fail("architectures", "must be a list with the name of the model's class")
    architecture: str = names[0]
    return architecture


def _architecture(read: ConfigReader) -> str:
    architecture = architecture_name(read)
    if architecture not in _FAMILIES:
        raise unsupported_architecture(architecture)
    return architecture


def reject_foreign_quantization(read: ConfigReader) -> None:
    quantization = read.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    raise UnsupportedModelError(
        f"config.json: quantization_config asks for {method or 'an unknown method'}, which is not"
        " supported; use the unquantized model or a GGUF file"
    )


def _head_dim(read: ConfigReader, hidden_size: int, num_heads: int, default: int | None) -> int:
    head_dim = read.optional_integer("head_dim") or default
    if head_dim is None:
        if hidden_size % num_heads:
            read.fail("num_attention_heads", f"does not divide hidden_size {hidden_size}")
        head_dim = hidden_size // num_heads
    return head_dim


def _hidden_act(read: ConfigReader) -> str:
    name = read.text("hidden_act", default="silu")
    if name not in HIDDEN_ACTS:
        known = ", ".join(HIDDEN_ACTS)
        raise UnsupportedModelError(
            f"config.json: hidden_act {name!r} is not supported; supported are {known}"
        )
    return HIDDEN_ACTS[name]


def read_torch_dtype(read: ConfigReader) -> str:
    name = read.text("dtype", default=read.text("torch_dtype", default="float32"))
    name = name.removeprefix("torch.")
    if name not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise UnsupportedModelError(
            f"config.json: torch_dtype {name!r} is not supported; supported are {known}"
        )
    return name


def _layer_windows(read: ConfigReader, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    window = family.sliding_window
    kinds = read.get("layer_types") if family.has_layer_types else None
    if kinds is None:
        first = family.first_window_layer
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        read.fail("layer_types", f"must be a list of {num_layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}, not supported")
        if kind == "sliding_attention" and window is None:
            read.fail("layer_types", "has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(read: ConfigReader, head_dim: int, max_positions: int) -> RopeConfig:
    # Values inside the rope dictionary win over the same ones beside it.
    rope = read.child("rope_parameters") or read.child("rope_scaling") or ConfigReader({})
    rope_type = rope.text("rope_type", default=rope.text("type", default="default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError(
            f"config.json: {rope.prefix}: different rope for different layers is not supported"
        )
    if rope_type not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise UnsupportedModelError(
            f"config.json: rope_type {rope_type!r} is not supported; supported are {known}"
        )
    theta = rope.number(
        "rope_theta", default=read.number("rope_theta", default=1e4, above=1.0), above=1.0
    )
    partial = rope.number(
        "partial_rotary_factor", default=read.number("partial_rotary_factor", default=1.0)
    )
    rotary_dim = int(head_dim * partial)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        read.fail("head_dim", f"gives {rotary_dim} rotated values a head, which must be even")
    if rope_type == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=partial)
    original = rope.integer("original_max_position_embeddings", default=max_positions)
    # Some configs keep the length of pre-training beside the rope dictionary; that one wins.
    original = read.integer("original_max_position_embeddings", default=original)
    if rope_type == "yarn" and rope.get("factor") is None:
        factor = max_positions / original
    else:
        factor = rope.number("factor", above=0.0)
    low, high = 1.0, 4.0
    if rope_type == "llama3":
        low = rope.number("low_freq_factor", above=0.0)
        high = rope.number("high_freq_factor", above=0.0)
        if high <= low:
            rope.fail("high_freq_factor", f"must be above low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        type=rope_type,
        partial_rotary_factor=partial,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.number("beta_fast", default=32.0, above=0.0),
        beta_slow=rope.number("beta_slow", default=1.0, above=0.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(rope, factor) if rope_type == "yarn" else 1.0,
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", above=0.0)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    mscale = rope.number("mscale", default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", default=0.0)
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
