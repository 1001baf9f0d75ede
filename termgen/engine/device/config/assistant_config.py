"""Gemma 4's assistants: small models that read the keys and values of the model they draft for.

All their layers do, so they store none. A layer reads those of the target's last layer of its kind
that stores some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.head_config import HeadConfig, check_alike
from termgen.engine.device.config.model_config import ModelConfig, architecture_name
from termgen.errors import UnsupportedModelError

ASSISTANT_TARGETS = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
ASSISTANT = "Gemma4AssistantForCausalLM"
_REFUSED_PARTS = {
    "hidden_size_per_layer_input": 256,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
"""Parts of a Gemma 4 that no assistant has, and what transformers takes for a key left out."""


def assistant_head(raw: Mapping[str, Any], target: ModelConfig, folder: Path) -> HeadConfig:
    """raw: the assistant's config.json. Raises UnsupportedModelError or CorruptFileError naming the
    key."""
    if target.architecture not in ASSISTANT_TARGETS:
        raise UnsupportedModelError(
            f"assistants draft for {', '.join(ASSISTANT_TARGETS)}, not for {target.architecture}"
        )
    read = ConfigReader(raw)
    if (architecture := architecture_name(read)) != ASSISTANT:
        raise UnsupportedModelError(
            f"config.json: architectures {architecture!r:.60} is no assistant; such is {ASSISTANT}"
        )
    if (text := read.child("text_config")) is None:
        read.fail("text_config", "is missing")
    for key, default in _REFUSED_PARTS.items():
        found = text.get(key)
        if (default if found is None else found) != 0:
            raise UnsupportedModelError(
                f"config.json: text_config.{key} must be {type(default)(0)!r} in an assistant"
            )
    tied = read.flag("tie_word_embeddings", default=True)
    own = {**text.present(), "num_kv_shared_layers": 0, "tie_word_embeddings": tied}
    own["hidden_size_per_layer_input"] = 0
    layers = ModelConfig.from_hf(
        {**raw, "architectures": ["Gemma4ForCausalLM"], "text_config": own}
    )
    check_alike("text_config.vocab_size", layers.vocab_size, target.vocab_size)
    backbone = read.integer("backbone_hidden_size", default=1536)
    check_alike("backbone_hidden_size", backbone, target.hidden_size)
    num_centroids, num_active = _centroids(read, layers.vocab_size)
    return HeadConfig(
        method="assistant",
        folder=folder,
        layers=_reading(layers, target).for_positions(target.max_position_embeddings),
        draft_vocab_size=layers.vocab_size,
        num_centroids=num_centroids,
        num_active_centroids=num_active,
    )


def _centroids(read: ConfigReader, vocab_size: int) -> tuple[int, int]:
    if not read.flag("use_ordered_embeddings", default=False):
        return 0, 0
    number = read.integer("num_centroids", default=2048)
    if vocab_size % number:
        read.fail("num_centroids", f"is {number}, which does not divide vocab_size {vocab_size}")
    return number, read.integer("centroid_intermediate_top_k", default=32, most=number)


def _reading(layers: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The layers with their places in the target's cache, numbered as `GroupedAttention.behind`
    numbers those of a target: below zero."""
    sources: list[int] = []
    windows: list[int | None] = []
    for layer, window in enumerate(layers.layer_windows):
        kind = "full_attention" if window is None else "sliding_attention"
        alike = [
            other
            for other, its in enumerate(target.layer_windows)
            if (its is None) == (window is None) and target.kv_source(other) == other
        ]
        if not alike:
            raise UnsupportedModelError(
                f"config.json: text_config.layer_types has {kind}, of which its target has no layer"
            )
        found, wanted = layers.kv_heads(layer), target.kv_heads(alike[-1])
        if found != wanted:
            raise UnsupportedModelError(
                f"config.json: text_config has {found[0]} key heads of {found[1]} in layers of"
                f" {kind}, but its target has {wanted[0]} of {wanted[1]}"
            )
        sources.append(alike[-1] - target.num_layers)
        windows.append(_without_itself(layers, target) if window is not None else None)
    differences = replace(layers.differences, kv_sources=tuple(sources), mlp_sizes=())
    return replace(layers, layer_windows=tuple(windows), differences=differences)


def _without_itself(layers: ModelConfig, target: ModelConfig) -> int:
    """The keys that a token sees through a window beside its own, of which there is none here."""
    window, its = layers.sliding_window or 0, target.sliding_window or 0
    check_alike("text_config.sliding_window", window, its)
    if window < 2:
        raise UnsupportedModelError(
            f"config.json: text_config.sliding_window {window} is too small"
        )
    return window - 1
