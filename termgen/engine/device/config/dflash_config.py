"""DFlash heads: the shape of their layers, and what they read of their target.

Published ones have two forms of config.json: that of a Qwen3 with a dictionary `dflash_config`
(`DFlashDraftModel`), and that of Muse Glimmer's assistant, whose keys all lie side by side. Both
have layers of Qwen3's kind, whose attention lets the tokens of a block see each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.head_config import (
    EAGLE3_TARGETS,
    HeadConfig,
    check_alike,
    check_key_heads,
)
from termgen.engine.device.config.model_config import ModelConfig, architecture_name
from termgen.errors import UnsupportedModelError

DFLASH_TARGETS = (*EAGLE3_TARGETS, "MuseGlimmerForConditionalGeneration")
DFLASH_HEAD, MUSE_HEAD = "DFlashDraftModel", "MuseGlimmerAssistantModel"
MAX_BLOCK = 64
_MUSE_KEYS = {
    "attention_bias": False,
    "block_size": 16,
    "mask_token_id": 201818,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_window": 2048,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
"""What transformers has for keys that a Muse Glimmer assistant leaves out."""
_REFUSED_FLAGS = ("is_causal", "causal", "attention_sink_bias", "use_swa")


def dflash_head(raw: Mapping[str, Any], target: ModelConfig, folder: Path) -> HeadConfig:
    """raw: the head's config.json. Raises UnsupportedModelError or CorruptFileError naming the
    key."""
    if target.architecture not in DFLASH_TARGETS:
        raise UnsupportedModelError(
            f"DFlash heads draft for {', '.join(DFLASH_TARGETS)}, not for {target.architecture}"
        )
    read, own, kinds = _readers(raw, target)
    for key in _REFUSED_FLAGS:
        if read.flag(key, default=False) or own.flag(key, default=False):
            raise UnsupportedModelError(f"config.json: {key} true is not supported")
    layers = ModelConfig.from_hf(_plain_qwen3(read))
    for key, found, wanted in (
        ("vocab_size", layers.vocab_size, target.vocab_size),
        ("hidden_size", layers.hidden_size, target.hidden_size),
        (
            "num_target_layers",
            read.optional_integer("num_target_layers") or target.num_layers,
            target.num_layers,
        ),
    ):
        check_alike(key, found, wanted)
    check_key_heads(layers, target)
    block_size = read.integer("block_size", least=2, most=MAX_BLOCK)
    windows = _windows(read, kinds, layers.num_layers, block_size)
    layers = replace(layers, layer_windows=windows)
    return HeadConfig(
        method="dflash",
        folder=folder,
        layers=layers.for_positions(target.max_position_embeddings),
        kept_layers=_kept_layers(own, layers.num_layers, target.num_layers),
        draft_vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=own.integer("mask_token_id", least=0, most=target.vocab_size - 1),
    )


def _readers(raw: Mapping[str, Any], target: ModelConfig) -> tuple[ConfigReader, ConfigReader, Any]:
    """The keys of the layers, those of what makes them a DFlash head, and the kinds of layers."""
    architecture = architecture_name(ConfigReader(raw))
    if architecture == MUSE_HEAD:
        given = {key: value for key, value in raw.items() if value is not None}
        read = ConfigReader({**_MUSE_KEYS, "vocab_size": target.vocab_size, **given})
        return read, read, read.get("layer_types") or "sliding_attention"
    if architecture != DFLASH_HEAD:
        raise UnsupportedModelError(
            f"config.json: architectures {architecture!r:.60} is no DFlash head; such are"
            f" {DFLASH_HEAD}, {MUSE_HEAD}"
        )
    read = ConfigReader(raw)
    if (own := read.child("dflash_config")) is None:
        read.fail("dflash_config", "is missing")
    return read, own, read.get("layer_types") or "full_attention"


def _plain_qwen3(read: ConfigReader) -> dict[str, Any]:
    """The config of the layers, windows left out."""
    left_out = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    kept = {key: value for key, value in read.present().items() if key not in left_out}
    return {**kept, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}


def _windows(
    read: ConfigReader, kinds: object, num_layers: int, block_size: int
) -> tuple[int | None, ...]:
    """Per layer, the tokens that one sees, counted from the last of a block: so many that the first
    of the block sees as far as `sliding_window` says. kinds: one for all layers, or a list."""
    if isinstance(kinds, str):
        kinds = [kinds] * num_layers
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        read.fail("layer_types", f"must be a list of {num_layers} names")
    windows: list[int | None] = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r:.40}, not supported")
        is_cut = kind == "sliding_attention"
        windows.append(read.integer("sliding_window") + block_size if is_cut else None)
    return tuple(windows)


def _kept_layers(own: ConfigReader, num_own: int, num_layers: int) -> tuple[int, ...]:
    """The ids name layers whose outputs are read, which are the inputs of those behind them."""
    ids = own.get("target_layer_ids")
    if ids is None:
        ids = [num_layers // 2]
        if num_own > 1:  # spread from the second layer to the fourth from the end
            span = num_layers - 4
            ids = [round(1 + layer * span / (num_own - 1)) for layer in range(num_own)]
    if not isinstance(ids, list | tuple) or any(type(layer) is not int for layer in ids):
        own.fail("target_layer_ids", "must be a list of layers")
    is_rising = all(one < following for one, following in zip(ids, ids[1:], strict=False))
    if not ids or not is_rising or not 0 <= ids[0] <= ids[-1] < num_layers - 1:
        own.fail(
            "target_layer_ids",
            f"names {list(ids)}, not some of the target's {num_layers} layers but the last,"
            " in rising order",
        )
    return tuple(layer + 1 for layer in ids)
