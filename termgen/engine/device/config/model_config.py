"""The shape of a model, read from its config.json. Frozen, and free of torch.

`ModelConfig.from_hf` takes the dictionary of a Hugging Face config (both the older form with
`rope_theta` and `rope_scaling`, and the newer one with `rope_parameters`); GGUF metadata is
translated to the same form first, so there is one reader. What differs between families in the
config (defaults, biases, windows) is in `_FAMILIES`; what differs in the arithmetic is in the
family's model class. A key that would change the arithmetic and is not understood is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.rope_config import RopeConfig, read_rope, rope_keys
from termgen.errors import UnsupportedModelError

HIDDEN_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
TORCH_DTYPES = ("float32", "bfloat16", "float16")

_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "sliding_window": 4096},
}
"""Values of keys that a config.json leaves out, where transformers' class for the architecture has
another default than most. A key that is null keeps that meaning."""

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
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")
"""Keys that a config with a vision part may hold for both parts."""
_GEMMA3_REFUSED = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names in a checkpoint with one tensor for each expert's matrix."""

    block: str
    """The part of a layer that holds the router and the experts."""
    gate: str
    up: str
    down: str


QWEN_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts: small gated MLPs, of which a router picks a few for each token."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Inner size of one expert."""
    norm_topk_prob: bool
    """True if the weights of a token's experts are scaled to add up to one."""
    sparse_layers: frozenset[int]
    """The layers that have experts in the place of an MLP."""
    names: ExpertNames


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSource:
    """The source of a model that runs through transformers' code."""

    raw: Mapping[str, Any]
    """The unmodified config.json."""
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
    window_rope: RopeConfig | None
    """The rotation of layers with a sliding window, in a family where it is another."""
    attention_scale: float
    """Factor of attention scores."""
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
    moe: MoeConfig | None = None
    weight_prefix: str = ""
    """Prefix of this model's tensors in the checkpoint; tensors without it are another model's."""
    overflows_float16: bool = False
    """True if activations of the family's models are known to leave the range of float16."""
    transformers: TransformersSource | None = None
    """Set when transformers' code runs the model. Its arithmetic is unknown here then: the fields
    from `intermediate_size` to `qk_norm` that attention and the cache do not need are empty."""

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        """Per layer, its rotary position embedding."""
        window_rope = self.window_rope or self.rope
        return tuple(self.rope if window is None else window_rope for window in self.layer_windows)

    @property
    def implementation(self) -> str:
        """The code that runs the model: one of config.MODEL_IMPLS."""
        return "termgen" if self.transformers is None else "transformers"

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices; norms and biases are too few to matter."""
        if self.transformers is not None:
            return self.transformers.num_parameters
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # of q and the output, k and v
        rows = self.num_layers * heads * self.head_dim
        sparse = 0
        if self.moe is not None:
            sparse = len(self.moe.sparse_layers)
            rows += sparse * self.moe.num_experts * (3 * self.moe.intermediate_size + 1)
        rows += (self.num_layers - sparse) * 3 * self.intermediate_size
        rows += self.vocab_size * (1 if self.tie_word_embeddings else 2)
        return rows * self.hidden_size

    def of_layer(self, layer: int) -> ModelConfig:
        """The config of one layer: without experts where it has a plain MLP."""
        if self.moe is None or layer in self.moe.sparse_layers:
            return self
        return replace(self, moe=None)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a config.json. Raises UnsupportedModelError or CorruptFileError naming the key."""
        architecture = _architecture(ConfigReader(config))
        read = ConfigReader({**_CLASS_DEFAULTS.get(architecture, {}), **config})
        if architecture.startswith("Gemma3"):
            read = _gemma3_keys(read)
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
        window_rope = None
        if family.window_rope is not None:
            window_rope = read_rope(read, family.window_rope, head_dim, max_positions)
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
            rope=read_rope(read, family.rope or rope_keys(read), head_dim, max_positions),
            window_rope=window_rope,
            attention_scale=(family.query_scalar or head_dim) ** -0.5,
            qkv_bias=family.qkv_bias,
            o_bias=family.o_bias,
            mlp_bias=family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_window=family.sliding_window,
            layer_windows=_layer_windows(read, family, num_layers),
            bos_token_id=read.token_id("bos_token_id"),
            eos_token_ids=read.token_ids("eos_token_id"),
            weight_prefix=family.weight_prefix,
            overflows_float16=family.overflows_float16,
            moe=family.moe(read, num_layers) if family.moe is not None else None,
            torch_dtype=read_torch_dtype(read),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The part of a family's config beyond the common keys."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Head size when the config has none; None: hidden_size / num_attention_heads."""
    sliding_window: int | None = None
    first_window_layer: int = 0
    has_layer_types: bool = False
    rope: ConfigReader | None = None
    """Keys of the rotary position embedding; None: where most families keep them."""
    window_rope: ConfigReader | None = None
    query_scalar: float | None = None
    """Queries are divided by its root; None: the head size."""
    weight_prefix: str = ""
    overflows_float16: bool = False
    moe: Callable[[ConfigReader, int], MoeConfig] | None = None
    """Reads the experts, given the number of layers."""


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


def _mixtral(read: ConfigReader) -> _Family:
    return _Family(sliding_window=read.optional_integer("sliding_window"), moe=_mixtral_moe)


def _qwen3_moe(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_window=_qwen_window(read),
        moe=_qwen3_moe_experts,
    )


def _gemma3(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    ropes = read.child("rope_parameters")
    assert ropes is not None  # _gemma3_keys
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_window=read.integer("sliding_window"),
        has_layer_types=True,
        rope=ropes.child("full_attention"),
        window_rope=ropes.child("sliding_attention"),
        query_scalar=read.number("query_pre_attn_scalar", above=0.0),
        overflows_float16=True,
    )


def _gemma3_with_vision(read: ConfigReader) -> _Family:
    return replace(_gemma3(read), weight_prefix="language_model.")


_FAMILIES: dict[str, Callable[[ConfigReader], _Family]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_vision,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def is_known(config: Mapping[str, Any]) -> bool:
    """True if a config.json is of a family that termgen has code of its own for."""
    return architecture_name(ConfigReader(config)) in _FAMILIES


def unsupported_architecture(architecture: str) -> UnsupportedModelError:
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    return UnsupportedModelError(
        f"termgen has no code of its own for the architecture {architecture!r}, only for {known}; "
        "leave model_impl termgen out to run it through transformers, where that is possible"
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


def _qwen3_moe_experts(read: ConfigReader, num_layers: int) -> MoeConfig:
    # transformers 5 writes the number under the name that Mixtral has for it.
    key = "num_experts" if read.get("num_local_experts") is None else "num_local_experts"
    step = read.integer("decoder_sparse_step", default=1)
    dense = _layer_list(read, "mlp_only_layers", num_layers)
    sparse = (layer for layer in range(num_layers) if (layer + 1) % step == 0)
    return MoeConfig(
        **_expert_sizes(read, key),
        intermediate_size=read.integer("moe_intermediate_size"),
        norm_topk_prob=read.flag("norm_topk_prob", default=False),
        sparse_layers=frozenset(sparse) - dense,
        names=QWEN_NAMES,
    )


def _mixtral_moe(read: ConfigReader, num_layers: int) -> MoeConfig:
    return MoeConfig(
        **_expert_sizes(read, "num_local_experts"),
        intermediate_size=read.integer("intermediate_size"),
        norm_topk_prob=True,
        sparse_layers=frozenset(range(num_layers)),
        names=MIXTRAL_NAMES,
    )


def _expert_sizes(read: ConfigReader, key: str) -> dict[str, int]:
    num_experts = read.integer(key, most=1024)
    chosen = read.integer("num_experts_per_tok")
    if chosen > num_experts:
        read.fail("num_experts_per_tok", f"is {chosen}, but there are {num_experts} experts")
    return {"num_experts": num_experts, "num_experts_per_tok": chosen}


def _layer_list(read: ConfigReader, key: str, num_layers: int) -> frozenset[int]:
    layers = read.get(key)
    if layers is None:
        return frozenset()
    if not isinstance(layers, list | tuple):
        read.fail(key, "must be a list of layers")
    for layer in layers:
        if type(layer) is not int or not 0 <= layer < num_layers:
            read.fail(key, f"must hold layers from 0 to {num_layers - 1}, not {layer!r}")
    return frozenset(layers)


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
        "rope_parameters": _gemma3_ropes(text),
    }
    return ConfigReader({**values, **changed}, text.prefix)


def _gemma3_layer_types(text: ConfigReader) -> list[str]:
    """The last layer of each group of `sliding_window_pattern` sees everything."""
    every = text.integer("sliding_window_pattern")
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(text.integer("num_hidden_layers", most=1024))
    ]


def _gemma3_ropes(text: ConfigReader) -> dict[str, dict[str, Any]]:
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
