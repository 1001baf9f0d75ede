"""Gemma 4's config.json: which layers see everything, their heads, and which share keys and values.

A config on the hub says what is different in layers without a window in keys of the family's own
(`global_head_dim`); transformers 5.23 writes the same as `per_layer_config`, layer by layer. What a
file leaves out gets the value that transformers' class has for it.
"""

from __future__ import annotations

from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.experts_config import GEMMA4_NAMES, MoeConfig, expert_numbers
from termgen.engine.device.config.layer_differences import LayerDifferences, PerLayerInputs
from termgen.errors import UnsupportedModelError

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
_FULL_HEAD_DIM = 512
_FULL_EVERY = 6
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
_KINDS = ("full_attention", "sliding_attention")
_SHARED_KEYS = (
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype"),
    *("quantization_config", "compression_config"),
)
"""Keys that a config with other parts may hold for all."""


def gemma4_keys(read: ConfigReader) -> ConfigReader:
    """The text model's config in the keys of other families: of a model with other parts, its
    text_config. Raises UnsupportedModelError or CorruptFileError naming the key."""
    text, values = text_values(read, _DEFAULTS, nulls=("hidden_size_per_layer_input",))
    if values.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(
            "config.json: use_bidirectional_attention 'all' is not supported: such a model embeds"
            " text and writes none"
        )
    activation = values["hidden_activation"]
    # transformers makes the last one so, whatever the file says.
    kinds = [*layer_kinds(text, _FULL_EVERY)[:-1], "full_attention"]
    ropes = text.child("rope_parameters") or ConfigReader(_ROPES)
    for kind in _KINDS:
        if ropes.child(kind) is None:
            text.fail("rope_parameters", f"has no {kind}")
    changed = {
        "hidden_act": activation,
        "layer_types": kinds,
        "rope_parameters": {kind: ropes.get(kind) for kind in _KINDS},
    }
    return ConfigReader({**values, **changed}, text.prefix)


def text_values(
    read: ConfigReader, defaults: dict[str, Any], *, nulls: tuple[str, ...] = ()
) -> tuple[ConfigReader, dict[str, Any]]:
    """The text model's config, with `defaults`, as a reader and as a dictionary: of a model with
    other parts, its text_config. nulls: keys whose null is a value."""
    text = read.child("text_config") or read
    shared = ConfigReader({key: read.get(key) for key in _SHARED_KEYS}).present()
    kept = {key: None for key in nulls if text.has(key) and text.get(key) is None}
    values = {**defaults, **shared, **text.present(), **kept}
    tied = read.get("tie_word_embeddings")
    if tied not in (None, values["tie_word_embeddings"]):
        read.fail("tie_word_embeddings", f"is {tied!r}, which that of text_config contradicts")
    return ConfigReader(values, text.prefix), values


def layer_kinds(text: ConfigReader, full_every: int) -> list[str]:
    """The layers' types; where there are none, every so many layers one has no window."""
    num_layers = text.integer("num_hidden_layers", most=1024)
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = [
            "sliding_attention" if (layer + 1) % full_every else "full_attention"
            for layer in range(num_layers)
        ]
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        text.fail("layer_types", f"must be a list of {num_layers} names")
    for kind in kinds:
        if kind not in _KINDS:
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}, not supported")
    return list(kinds)


def gemma4_differences(read: ConfigReader) -> LayerDifferences:
    """read: as `gemma4_keys` returns it."""
    kinds: list[str] = read.get("layer_types")
    keys_are_values = read.flag("attention_k_eq_v", default=False)
    sources = kv_sources(read, kinds)
    sizes: tuple[int, ...] = ()
    if read.flag("use_double_wide_mlp", default=False):
        size = read.integer("intermediate_size")
        sizes = tuple(size if source == layer else 2 * size for layer, source in enumerate(sources))
    return LayerDifferences(
        full_heads=_full_heads(read, kinds, keys_are_values=keys_are_values),
        keys_are_values=keys_are_values,
        kv_sources=sources,
        mlp_sizes=sizes,
    )


def _full_heads(read: ConfigReader, kinds: list[str], *, keys_are_values: bool) -> tuple[int, int]:
    num_kv_heads = read.integer("num_key_value_heads")
    head_dim = read.integer("global_head_dim", default=_FULL_HEAD_DIM)
    if keys_are_values:
        num_kv_heads = read.integer("num_global_key_value_heads", default=num_kv_heads)
    if (by_layer := read.child("per_layer_config")) is not None:
        num_kv_heads, head_dim = _heads_by_layer(by_layer, read, kinds)
        if (other := read.get("global_head_dim")) not in (None, head_dim):
            read.fail("global_head_dim", f"is {other!r}, but per_layer_config says {head_dim}")
    num_heads = read.integer("num_attention_heads")
    if num_heads % num_kv_heads:
        read.fail(
            "num_global_key_value_heads",
            f"is {num_kv_heads}, which does not divide num_attention_heads {num_heads}",
        )
    return num_kv_heads, head_dim


def _heads_by_layer(
    by_layer: ConfigReader, read: ConfigReader, kinds: list[str]
) -> tuple[int, int]:
    """The heads of the layers without a window, which have to be the same in all of them."""
    usual = read.integer("num_key_value_heads"), read.integer("head_dim")
    names: dict[int, str] = {}  # written with zeros in front
    for name in by_layer.present():
        if not name.isdecimal() or int(name) >= len(kinds):
            by_layer.fail(name, f"is no layer of {len(kinds)}")
        names[int(name)] = name
    found = set()
    for layer, kind in enumerate(kinds):
        name = names.get(layer, str(layer))
        own = by_layer.child(name) or ConfigReader({}, f"{by_layer.prefix}.{name}")
        heads = (
            own.integer("num_key_value_heads", default=usual[0]),
            own.integer("head_dim", default=usual[1]),
        )
        if kind == "full_attention":
            found.add(heads)
        elif heads != usual:
            own.fail("head_dim", f"and num_key_value_heads are not those of {kind}, {usual}")
    if len(found) > 1:
        read.fail("per_layer_config", "has other heads in some layers of full_attention")
    return found.pop()


def kv_sources(read: ConfigReader, kinds: list[str]) -> tuple[int, ...]:
    """The last layers read the keys and values of the last one of their kind that stores some."""
    num_shared = read.integer("num_kv_shared_layers", least=0)
    first = len(kinds) - num_shared
    if first < 1:
        read.fail("num_kv_shared_layers", f"is {num_shared}, and there are {len(kinds)} layers")
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    for kind in kinds[first:]:
        if kind not in last:
            read.fail("num_kv_shared_layers", f"leaves no layer of {kind} to share with")
    return (*range(first), *(last[kind] for kind in kinds[first:]))


def gemma4_inputs(read: ConfigReader) -> PerLayerInputs | None:
    size = read.get("hidden_size_per_layer_input")
    if not size:
        return None
    inputs = PerLayerInputs(
        vocab_size=read.integer("vocab_size_per_layer_input"),
        size=read.integer("hidden_size_per_layer_input"),
    )
    if inputs.vocab_size < read.integer("vocab_size"):
        read.fail("vocab_size_per_layer_input", f"is {inputs.vocab_size}, less than vocab_size")
    return inputs


def gemma4_experts(read: ConfigReader, num_layers: int) -> MoeConfig:
    num_experts, chosen = expert_numbers(read, "num_experts", "top_k_experts")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=read.integer("moe_intermediate_size"),
        norm_topk_prob=True,
        sparse_layers=frozenset(range(num_layers)),
        names=GEMMA4_NAMES,
        is_beside_mlp=True,
    )
