"""Heads that guess tokens for a target model: the shape of their layers, and what they read.

An MTP layer lies in the target's own files and has the shape of its layers. An EAGLE-3 head has a
folder of its own, whose config.json has one of two forms: that of a Llama with a few keys more, and
that of the speculators library, which has the Llama's keys in a dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.model_config import ModelConfig, architecture_name
from termgen.errors import UnsupportedModelError

EAGLE3_TARGETS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
EAGLE3_HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUM_KEPT = 3
"""Layers of its target that an EAGLE-3 head reads."""
_AUX = "eagle_aux_hidden_state_layer_ids"
_REFUSED_FLAGS = ("norm_before_fc", "fc_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head of some layers, or a whole model that drafts."""

    method: str
    folder: Path | None
    """The place of its tensors; None: in the target's files."""
    layers: ModelConfig
    """The shape of its layers."""
    kept_layers: tuple[int, ...] = ()
    """Layers of the target whose inputs it reads; none: what is behind the final norm."""
    draft_vocab_size: int
    """Tokens that it can guess."""
    norms_residual: bool = False
    """True if its residual stream begins with the states behind their norm."""
    block_size: int = 1
    """Tokens of a pass whose drafts come all at once: the newest one, and noise behind it."""
    mask_token_id: int = 0
    """The token whose embedding is the noise."""
    num_centroids: int = 0
    """Clusters of tokens that it looks for the likeliest in; 0: it looks at all tokens."""
    num_active_centroids: int = 0
    """Clusters whose tokens it looks at."""


def mtp_head(target: ModelConfig) -> HeadConfig:
    """The layer in a target's own files. Raises UnsupportedModelError."""
    if not target.num_mtp_layers:
        raise UnsupportedModelError(f"this {target.architecture} has no MTP layer")
    if target.num_mtp_layers > 1:
        raise UnsupportedModelError(
            f"config.json: mtp_num_hidden_layers {target.num_mtp_layers} is not supported, only 1"
        )
    moe = None if target.moe is None else replace(target.moe, sparse_layers=frozenset((0,)))
    layers = replace(target, num_layers=1, layer_windows=(None,), linear=None, moe=moe)
    return HeadConfig(method="mtp", folder=None, layers=layers, draft_vocab_size=target.vocab_size)


def draft_model(layers: ModelConfig, target: ModelConfig, path: Path) -> HeadConfig:
    """A smaller model of the same vocabulary. Raises UnsupportedModelError."""
    if layers.linear is not None or layers.transformers is not None:
        why = "has recurrent layers" if layers.linear is not None else "is run by transformers"
        raise UnsupportedModelError(f"{path}: {layers.architecture} {why}, so it cannot draft")
    if layers.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"{path}: vocab_size is {layers.vocab_size}, but its target has {target.vocab_size}"
        )
    layers = layers.for_positions(target.max_position_embeddings)
    size = layers.vocab_size
    return HeadConfig(method="draft_model", folder=path, layers=layers, draft_vocab_size=size)


def eagle3_head(raw: Mapping[str, Any], target: ModelConfig, folder: Path) -> HeadConfig:
    """raw: the head's config.json. Raises UnsupportedModelError or CorruptFileError naming the
    key."""
    if target.architecture not in EAGLE3_TARGETS:
        raise UnsupportedModelError(
            f"EAGLE-3 heads draft for {', '.join(EAGLE3_TARGETS)}, not for {target.architecture}"
        )
    read = ConfigReader(raw)
    inner = _of_speculators(read) if "speculators_model_type" in raw else _of_llama(read, raw)
    llama = {**inner, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    layers = ModelConfig.from_hf(llama)
    check_alike("num_hidden_layers", layers.num_layers, 1, whose="a head")
    check_alike("vocab_size", layers.vocab_size, target.vocab_size)
    into = read.optional_integer("target_hidden_size") or target.hidden_size
    check_alike("target_hidden_size", into, target.hidden_size)
    for key in _REFUSED_FLAGS:
        if read.flag(key, default=False):
            raise UnsupportedModelError(f"config.json: {key} true is not supported")
    check_key_heads(layers, target)
    return HeadConfig(
        method="eagle3",
        folder=folder,
        layers=layers.for_positions(target.max_position_embeddings),
        kept_layers=_kept_layers(read, target.num_layers),
        draft_vocab_size=read.optional_integer("draft_vocab_size") or target.vocab_size,
        norms_residual=read.flag("norm_before_residual", default=False),
    )


def check_alike(key: str, found: int, wanted: int, whose: str = "its target") -> None:
    """Raises UnsupportedModelError naming the key of a head's config.json."""
    if found != wanted:
        raise UnsupportedModelError(f"config.json: {key} is {found}, but {whose} has {wanted}")


def check_key_heads(layers: ModelConfig, target: ModelConfig) -> None:
    """layers: of a head. Raises UnsupportedModelError where no attention serves both."""
    is_same_kind = target.kv_heads(0) == layers.kv_heads(0)
    if is_same_kind and layers.num_heads != target.num_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads is {layers.num_heads} on key heads like the"
            f" target's, which has {target.num_heads} on them"
        )


def _of_llama(read: ConfigReader, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    name = architecture_name(read)
    if name not in EAGLE3_HEADS:
        raise UnsupportedModelError(
            f"config.json: architectures {name!r} is no EAGLE-3 head; such are"
            f" {', '.join(EAGLE3_HEADS)}"
        )
    return raw


def _of_speculators(read: ConfigReader) -> Mapping[str, Any]:
    if (kind := read.get("speculators_model_type")) != "eagle3":
        raise UnsupportedModelError(
            f"config.json: speculators_model_type {str(kind)[:40]!r} is not supported, only eagle3"
        )
    inner = read.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        read.fail("transformer_layer_config", "must be a dictionary")
    if (kind := inner.get("model_type", "llama")) != "llama":
        raise UnsupportedModelError(
            f"config.json: model_type {str(kind)[:40]!r} of a head is not supported, only llama"
        )
    return inner


def _kept_layers(read: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Numbers count the layers ahead of what is read. Within `eagle_config`, where SpecForge
    writes them, they name the layer whose output it is."""
    ids, more = read.get(_AUX), 0
    if ids is None and (nested := read.child("eagle_config")) is not None:
        ids, more = nested.get(_AUX), 1
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    if not isinstance(ids, list | tuple) or any(type(layer) is not int for layer in ids):
        read.fail(_AUX, "must be a list of layers")
    kept = tuple(sorted({layer + more for layer in ids}))
    if len(kept) != NUM_KEPT or not 0 <= kept[0] <= kept[-1] < num_layers:
        read.fail(_AUX, f"names {list(ids)}, not {NUM_KEPT} of the target's {num_layers} layers")
    return kept
