"""Qwen3: every head of q and k is normalised before it is rotated."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.norm import HeadNorm
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer
from termgen.vocabulary.cache_groups import Window


class Qwen3Layer(DecoderLayer):
    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self.qk_norm = HeadNorm(config, build)

    def qk_norm_weight(self) -> torch.Tensor:
        return self.qk_norm.weight

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield from self.qk_norm.weight_slots(f"{prefix}.self_attn")


class Qwen3ForCausalLM(CausalDecoder):
    layer_class = Qwen3Layer
