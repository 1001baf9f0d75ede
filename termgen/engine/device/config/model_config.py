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

from termgen.engine.device.config.cache_spec import CacheSpec
from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.experts_config import (
    MoeConfig,
    gpt_oss_experts,
    mixtral_experts,
    qwen3_5_experts,
    qwen3_moe_experts,
    qwen3_next_experts,
)
from termgen.engine.device.config.family_keys import common_keys, muse_unrotated, read_torch_dtype
from termgen.engine.device.config.gemma3n_config import (
    gemma3n_differences,
    gemma3n_inputs,
    gemma3n_streams,
)
from termgen.engine.device.config.gemma4_config import (
    gemma4_differences,
    gemma4_experts,
    gemma4_inputs,
)
from termgen.engine.device.config.layer_differences import (
    LayerDifferences,
    PerLayerInputs,
    ResidualStreams,
)
from termgen.engine.device.config.linear_config import LinearAttention, linear_attention
from termgen.engine.device.config.llama4_config import (
    LLAMA4_BLOCK,
    Temperature,
    llama4_experts,
    llama4_temperature,
    llama4_unrotated,
)
from termgen.engine.device.config.rope_config import NO_ROPE, RopeConfig, read_rope, rope_keys
from termgen.engine.device.config.stored_weights import check_stored_weights
from termgen.errors import UnsupportedModelError
from termgen.vocabulary.cache_groups import Chunk, Window

HIDDEN_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_QWEN3_5_ROTARY = 0.25
"""The part of a head that is rotated, where a config.json does not say."""
WeightPrefixes = tuple[tuple[str, str | None], ...]
_ALL_WEIGHTS: WeightPrefixes = (("", ""),)
_AROUND_VISION: WeightPrefixes = (("language_model.", ""), ("", None))
_BESIDE_VISION: WeightPrefixes = (
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
    ("", None),
)
_QWEN3_5_WEIGHTS: WeightPrefixes = (
    ("model.language_model.", "model."),
    *((name, None) for name in ("model.visual.", "mtp.")),
    ("", ""),
)
MTP_WEIGHTS: WeightPrefixes = (("mtp.", "mtp."), ("", None))
"""The same for the layer behind a model's own."""
_QWEN3_NEXT_WEIGHTS: WeightPrefixes = (("mtp.", None), ("", ""))


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
    """Positions that its rotations are for."""
    extended_positions: int | None = None
    """Positions that other rotations can be made for, the same for all requests; None: no more."""
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    rope: RopeConfig
    window_rope: RopeConfig | None
    """The rotation of layers with a sliding window, in a family where it is another."""
    attention_scale: float
    """Factor of attention scores."""
    attention_softcap: float | None = None
    """A score s becomes attention_softcap * tanh(s / attention_softcap)."""
    logit_softcap: float | None = None
    """The same for logits."""
    logit_factor: float = 1.0
    """Factor of logits, ahead of their cap."""
    post_norm_eps: float | None = None
    """The epsilon of norms after attention and MLP, if it is not `rms_norm_eps`."""
    has_attention_gate: bool = False
    """True if each number that attention gives is multiplied by a gate, from the layer's input."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers without a rotary position embedding."""
    temperature: Temperature | None = None
    """Factors of the queries of these layers, by position."""
    has_sinks: bool = False
    """True if each softmax of attention has one more score, a weight of the head."""
    has_output_gate: bool = False
    """True if attention's output is multiplied by the sigmoid of a gate. q_proj has its rows beside
    those of the queries, head by head."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    layer_windows: tuple[Window | None, ...]
    """Per layer, the part of a context that a token sees; None: all."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    moe: MoeConfig | None = None
    linear: LinearAttention | None = None
    """Set for families some of whose layers are recurrent."""
    num_mtp_layers: int = 0
    """Layers behind the model's own that guess further tokens, where a checkpoint has them."""
    differences: LayerDifferences = LayerDifferences()
    per_layer_inputs: PerLayerInputs | None = None
    streams: ResidualStreams | None = None
    """None for a model with one residual stream."""
    weight_prefixes: WeightPrefixes = _ALL_WEIGHTS
    """How tensors' names in the checkpoint begin, and what that stands for; the first counts. None:
    a tensor of another model."""
    mlp_block: str = "mlp"
    """The part of a layer that holds its MLP or experts, in a checkpoint."""
    overflows_float16: bool = False
    """True if activations of the family's models are known to leave the range of float16."""
    transformers: TransformersSource | None = None
    """Set when transformers' code runs the model. Its arithmetic is unknown here then: the fields
    from `intermediate_size` to `qk_norm` that attention and the cache do not need are empty."""

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        """Per layer, its rotary position embedding."""
        window_rope = self.window_rope or self.rope
        return tuple(
            NO_ROPE
            if layer in self.unrotated_layers
            else (self.rope if window is None else window_rope)
            for layer, window in enumerate(self.layer_windows)
        )

    @property
    def layer_caches(self) -> tuple[CacheSpec | None, ...]:
        """Per layer, what it keeps of every token; None for recurrent layers and those that read
        what others keep."""
        recurrent = () if self.linear is None else self.linear.layers
        return tuple(
            None
            if layer in recurrent or self.kv_source(layer) != layer
            else CacheSpec(*self.kv_heads(layer), window)
            for layer, window in enumerate(self.layer_windows)
        )

    def kv_heads(self, layer: int) -> tuple[int, int]:
        """Number and size of the key heads that a layer reads."""
        full = self.differences.full_heads
        if full is not None and self.layer_windows[layer] is None:
            return full
        return self.num_kv_heads, self.head_dim

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads; its own number, in most models."""
        sources = self.differences.kv_sources
        return sources[layer] if sources else layer

    def for_positions(self, longest: int) -> ModelConfig:
        """The config whose rotations are for contexts of that length."""
        if longest <= self.max_position_embeddings:
            return self
        return replace(self, max_position_embeddings=longest)

    @property
    def implementation(self) -> str:
        """The code that runs the model: one of config.MODEL_IMPLS."""
        return "termgen" if self.transformers is None else "transformers"

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices; norms and biases are too few to matter."""
        if self.transformers is not None:
            return self.transformers.num_parameters
        recurrent = () if self.linear is None else self.linear.layers
        rows = 0
        if (linear := self.linear) is not None:
            # q, k, v and the two gates; the output's gate and its projection
            of_layer = linear.num_channels + 2 * linear.num_v_heads * (linear.v_dim + 1)
            rows += len(linear.layers) * of_layer
        for layer in range(self.num_layers):
            own = self.of_layer(layer)
            if layer not in recurrent:
                heads = 2 * own.num_heads + own.num_kv_heads * (1 if own.keys_are_values else 2)
                heads += own.num_heads * (self.has_attention_gate or self.has_output_gate)
                rows += heads * own.head_dim
            if own.moe is None or own.moe.is_beside_mlp:
                rows += 3 * own.intermediate_size
            if own.moe is not None:
                rows += own.moe.num_experts * (3 * own.moe.intermediate_size + 1)
                rows += 3 * (own.moe.shared_intermediate_size or 0)
        rows += self.vocab_size * (1 if self.tie_word_embeddings else 2)
        others = 0
        if (inputs := self.per_layer_inputs) is not None:
            rows += 3 * self.num_layers * inputs.size
            others = inputs.vocab_size * self.num_layers * inputs.size
        if (streams := self.streams) is not None:
            rows += self.num_layers * (2 * streams.laurel_rank + streams.num)
            rows += 2 * (streams.num - 1) * self.hidden_size
        return rows * self.hidden_size + others

    @property
    def keys_are_values(self) -> bool:
        """True, in the config of one layer, if it has no projection of values."""
        return self.differences.keys_are_values

    @property
    def gate_sparsity(self) -> float:
        """In the config of one layer, the part of its MLP's gates that are closed."""
        return next(iter(self.differences.gate_sparsities), 0.0)

    def of_layer(self, layer: int) -> ModelConfig:
        """The config of one layer: with its own heads, of which `num_kv_heads` is 0 where it reads
        another's, and without experts where it has a plain MLP."""
        changes: dict[str, Any] = {}
        if self.moe is not None and layer not in self.moe.sparse_layers:
            changes["moe"] = None
        differences = self.differences
        if differences != LayerDifferences():
            has_own = self.kv_source(layer) == layer
            num_kv_heads, changes["head_dim"] = self.kv_heads(layer)
            changes["num_kv_heads"] = num_kv_heads if has_own else 0
            if differences.mlp_sizes:
                changes["intermediate_size"] = differences.mlp_sizes[layer]
            are_values = differences.keys_are_values and self.layer_windows[layer] is None
            changes["differences"] = LayerDifferences(
                keys_are_values=are_values,
                gate_sparsities=differences.gate_sparsities[layer : layer + 1],
            )
        return replace(self, **changes) if changes else self

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a config.json. Raises UnsupportedModelError or CorruptFileError naming the key."""
        architecture = _architecture(ConfigReader(config))
        read = common_keys(architecture, config)
        family = _FAMILIES[architecture](read)
        check_stored_weights(read, architecture)
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
        rope = read_rope(
            read, family.rope or rope_keys(read), head_dim, max_positions, family.partial_rotary
        )
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
            rope=rope,
            window_rope=window_rope,
            attention_scale=family.query_factor * (family.query_scalar or head_dim) ** -0.5,
            attention_softcap=family.attention_softcap,
            logit_softcap=family.logit_softcap,
            logit_factor=family.logit_factor,
            post_norm_eps=family.post_norm_eps,
            has_attention_gate=family.has_attention_gate,
            unrotated_layers=(
                muse_unrotated(read, num_layers, rope.theta)
                if family.has_layer_thetas
                else family.unrotated_layers
            ),
            temperature=family.temperature,
            has_sinks=family.has_sinks,
            has_output_gate=family.has_output_gate,
            qkv_bias=family.qkv_bias,
            o_bias=family.o_bias,
            mlp_bias=family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_window=family.sliding_window,
            layer_windows=_layer_windows(read, family, num_layers),
            bos_token_id=read.token_id("bos_token_id"),
            eos_token_ids=read.token_ids("eos_token_id"),
            weight_prefixes=family.weight_prefixes,
            mlp_block=family.mlp_block,
            overflows_float16=family.overflows_float16,
            moe=family.moe(read, num_layers) if family.moe is not None else None,
            linear=family.linear(read, num_layers) if family.linear is not None else None,
            num_mtp_layers=family.num_mtp_layers,
            differences=family.differences,
            per_layer_inputs=family.per_layer_inputs,
            streams=family.streams,
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
    chunk: Chunk | None = None
    first_window_layer: int = 0
    has_layer_types: bool = False
    rope: ConfigReader | None = None
    """Keys of the rotary position embedding; None: where most families keep them."""
    window_rope: ConfigReader | None = None
    query_scalar: float | None = None
    """Queries are divided by its root; None: the head size."""
    query_factor: float = 1.0
    """Queries are multiplied by it, besides."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_factor: float = 1.0
    post_norm_eps: float | None = None
    has_attention_gate: bool = False
    has_layer_thetas: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    temperature: Temperature | None = None
    has_sinks: bool = False
    weight_prefixes: WeightPrefixes = _ALL_WEIGHTS
    mlp_block: str = "mlp"
    has_output_gate: bool = False
    partial_rotary: float | None = None
    """The part of a head that is rotated when the config does not say; None: all, always."""
    overflows_float16: bool = False
    differences: LayerDifferences = LayerDifferences()
    per_layer_inputs: PerLayerInputs | None = None
    streams: ResidualStreams | None = None
    moe: Callable[[ConfigReader, int], MoeConfig] | None = None
    """Reads the experts, given the number of layers."""
    linear: Callable[[ConfigReader, int], LinearAttention | None] | None = None
    """Reads the recurrent layers, given the number of layers."""
    num_mtp_layers: int = 0


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
    return _Family(sliding_window=read.optional_integer("sliding_window"), moe=mixtral_experts)


def _qwen3_moe(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_window=_qwen_window(read),
        moe=qwen3_moe_experts,
    )


def _gemma2(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        sliding_window=read.optional_integer("sliding_window"),
        has_layer_types=True,
        query_scalar=read.number("query_pre_attn_scalar", above=0.0),
        attention_softcap=_softcap(read, "attn_logit_softcapping"),
        logit_softcap=_softcap(read, "final_logit_softcapping"),
        overflows_float16=True,
    )


def _gpt_oss(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=True)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        sliding_window=read.optional_integer("sliding_window"),
        has_layer_types=True,
        has_sinks=True,
        moe=gpt_oss_experts,
    )


def _qwen3_5(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        has_output_gate=True,
        partial_rotary=_QWEN3_5_ROTARY,
        weight_prefixes=_QWEN3_5_WEIGHTS,
        linear=linear_attention,
        num_mtp_layers=read.integer("mtp_num_hidden_layers", default=1, least=0),
    )


def _qwen3_5_moe(read: ConfigReader) -> _Family:
    return replace(_qwen3_5(read), moe=qwen3_5_experts)


def _qwen3_next(read: ConfigReader) -> _Family:
    def linear(read: ConfigReader, num_layers: int) -> LinearAttention | None:
        found = linear_attention(read, num_layers)
        return None if found is None else replace(found, is_by_k_head=True)

    weights, experts = _QWEN3_NEXT_WEIGHTS, qwen3_next_experts
    return replace(_qwen3_5(read), weight_prefixes=weights, moe=experts, linear=linear)


def _softcap(read: ConfigReader, key: str) -> float | None:
    return None if read.get(key) is None else read.number(key, above=0.0)


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
    return replace(_gemma3(read), weight_prefixes=_AROUND_VISION)


def _gemma3n(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    ropes = read.child("rope_parameters")
    assert ropes is not None  # gemma3n_keys
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_window=read.integer("sliding_window"),
        has_layer_types=True,
        rope=ropes.child("full_attention"),
        window_rope=ropes.child("sliding_attention"),
        query_scalar=1.0,
        logit_softcap=_softcap(read, "final_logit_softcapping"),
        overflows_float16=True,
        differences=gemma3n_differences(read),
        per_layer_inputs=gemma3n_inputs(read),
        streams=gemma3n_streams(read),
    )


def _gemma3n_with_others(read: ConfigReader) -> _Family:
    return replace(_gemma3n(read), weight_prefixes=_BESIDE_VISION)


def _gemma4(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    ropes = read.child("rope_parameters")
    assert ropes is not None  # gemma4_keys
    has_experts = read.flag("enable_moe_block", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_window=read.integer("sliding_window"),
        has_layer_types=True,
        rope=ropes.child("full_attention"),
        window_rope=ropes.child("sliding_attention"),
        query_scalar=1.0,
        logit_softcap=_softcap(read, "final_logit_softcapping"),
        overflows_float16=True,
        differences=gemma4_differences(read),
        per_layer_inputs=gemma4_inputs(read),
        moe=gemma4_experts if has_experts else None,
    )


def _gemma4_with_others(read: ConfigReader) -> _Family:
    return replace(_gemma4(read), weight_prefixes=_BESIDE_VISION)


def _muse(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_window=read.optional_integer("sliding_window"),
        has_layer_types=True,
        query_factor=read.number("qk_scale_factor", above=0.0),
        logit_softcap=read.number("final_logit_softcapping", above=0.0),
        logit_factor=read.number("output_multiplier", above=0.0),
        post_norm_eps=read.number("post_norm_eps", above=0.0),
        has_attention_gate=True,
        has_layer_thetas=True,
        weight_prefixes=_BESIDE_VISION,
    )


def _llama4(read: ConfigReader) -> _Family:
    attention_bias = read.flag("attention_bias", default=False)
    return _Family(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=read.flag("use_qk_norm", default=True),
        chunk=Chunk(read.integer("attention_chunk_size")),
        has_layer_types=True,
        unrotated_layers=llama4_unrotated(read),
        temperature=llama4_temperature(read),
        moe=llama4_experts if read.get("moe_layers") else None,
        mlp_block=LLAMA4_BLOCK,
    )


def _llama4_with_vision(read: ConfigReader) -> _Family:
    return replace(_llama4(read), weight_prefixes=_AROUND_VISION)


_FAMILIES: dict[str, Callable[[ConfigReader], _Family]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_vision,
    "Gemma3nForCausalLM": _gemma3n,
    "Gemma3nForConditionalGeneration": _gemma3n_with_others,
    "Gemma4ForCausalLM": _gemma4,
    "Gemma4ForConditionalGeneration": _gemma4_with_others,
    "GptOssForCausalLM": _gpt_oss,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4_with_vision,
    "MuseGlimmerForConditionalGeneration": _muse,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
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


def _layer_windows(
    read: ConfigReader, family: _Family, num_layers: int
) -> tuple[Window | None, ...]:
    window = family.sliding_window
    kinds = read.get("layer_types") if family.has_layer_types else None
    if kinds is None:
        first = family.first_window_layer
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        read.fail("layer_types", f"must be a list of {num_layers} names")
    meant: dict[str, Window | None] = {"full_attention": None, "sliding_attention": window}
    if family.chunk is not None:
        meant = {"full_attention": None, "chunked_attention": family.chunk}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in meant:
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}, not supported")
        if kind == "sliding_attention" and window is None:
            read.fail("layer_types", "has sliding_attention, but no sliding_window is in use")
    return tuple(meant[kind] for kind in kinds)
