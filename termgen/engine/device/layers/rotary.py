"""Rotary position embedding: the frequencies of every supported scaling, and the rotation.

Cosines and sines are computed once per step from the positions, in float32, and handed to the
layers; there is no table, so memory does not grow with the context length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from termgen.engine.device.config.rope_config import RopeConfig


class Rotation(NamedTuple):
    """One step's cosines and sines, [T, 1, rotary_dim] float32.

    The sines of the first half carry a minus sign: with the halves of x swapped,
    x * cos + swapped * sin is the rotation, without negating anything in a layer.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """heads [T, any, head_dim], the first rotary_dim values of each head rotated in float32."""
    rotary_dim = rotation.cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        turned = rotate(heads[..., :rotary_dim], rotation)
        return torch.cat((turned, heads[..., rotary_dim:]), -1)
    swapped = heads.roll(rotary_dim // 2, -1)
    return (heads * rotation.cos).addcmul_(swapped, rotation.sin).to(heads.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] float32 on the CPU: radians per position."""
    dim = int(head_dim * config.partial_rotary_factor)
    powers = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.type == "linear":
        return 1.0 / powers / config.factor
    if config.type == "llama3":
        return _llama3(1.0 / powers, config)
    if config.type == "yarn":
        return _yarn(powers, config, dim)
    assert config.type == "default", config.type
    return 1.0 / powers


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / config.factor + keep * frequencies


def _yarn(powers: torch.Tensor, config: RopeConfig, dim: int) -> torch.Tensor:
    """Dimensions that turn often in the original context are kept, the slow ones interpolated."""

    def dimension_turning(times: float) -> float:
        length = config.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension_turning(config.beta_fast), dimension_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return (1.0 / (config.factor * powers)) * interpolate + (1.0 / powers) * (1 - interpolate)
