"""Gemma 3: as Gemma 2, but every head of q and k is normalised, and nothing is capped."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.norm import HeadNorm
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.gemma2 import Gemma2ForCausalLM, Gemma2Layer
from termgen.vocabulary.cache_groups import Window


class Gemma3Layer(Gemma2Layer):
    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self.qk_norm = HeadNorm(config, build, self.norm_offset)

    def qk_norm_weight(self) -> torch.Tensor:
        return self.qk_norm.weight

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield from self.qk_norm.weight_slots(f"{prefix}.self_attn")


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    layer_class = Gemma3Layer
