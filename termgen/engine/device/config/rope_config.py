"""Rotary position embedding as a config.json describes it. Frozen, and free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields after `partial_rotary_factor` belong to scalings."""

    theta: float = 10000.0
    type: str = "default"
    partial_rotary_factor: float = 1.0
    proportion: float = 1.0
    """The part of the frequencies that are not zero, counted over whole heads."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Factor of cos and sin: given, or computed as YaRN defines it."""


NO_ROPE = RopeConfig(type="none")
"""Layers whose q and k stay as they are at every position."""


def rope_keys(read: ConfigReader) -> ConfigReader:
    return read.child("rope_parameters") or read.child("rope_scaling") or ConfigReader({})


def read_rope(
    read: ConfigReader,
    rope: ConfigReader,
    head_dim: int,
    max_positions: int,
    partial_rotary: float | None = None,
) -> RopeConfig:
    """partial_rotary: the part of a head that is rotated if the config does not say; None for
    families that rotate whole heads, and refuse anything else."""
    # Values inside the rope dictionary win over the same ones beside it.
    rope_type = rope.text("rope_type", default=rope.text("type", default="default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError(
            f"config.json: {rope.prefix}: different rope for different layers is not supported"
        )
    if rope_type not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise UnsupportedModelError(
            f"config.json: rope_type {rope_type!r} is not supported; supported are {known};"
            " --model-impl transformers may run it"
        )
    theta = rope.number(
        "rope_theta", default=read.number("rope_theta", default=1e4, above=1.0), above=1.0
    )
    if rope_type == "proportional":
        proportion = rope.number("partial_rotary_factor", default=1.0, above=0.0)
        if proportion > 1.0:
            rope.fail("partial_rotary_factor", f"must be at most 1, not {proportion}")
        factor = rope.number("factor", default=1.0, above=0.0)
        return RopeConfig(theta=theta, type=rope_type, proportion=proportion, factor=factor)
    default = partial_rotary or 1.0
    partial = rope.number(
        "partial_rotary_factor",
        default=read.number("partial_rotary_factor", default=default, above=0.0),
        above=0.0,
    )
    if partial_rotary is None and partial != 1.0:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {partial} is not supported for this architecture:"
            " transformers ignores it and other programs apply it, so the answers would differ;"
            " --model-impl transformers runs it as transformers does"
        )
    if partial > 1.0:
        read.fail("partial_rotary_factor", f"must be at most 1, not {partial}")
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not rotary_dim:
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
        if high < low:
            rope.fail("high_freq_factor", f"must not be below low_freq_factor {low}")
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
