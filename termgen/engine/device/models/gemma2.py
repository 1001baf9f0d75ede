"""Gemma 2: norms around each half of a layer, weights as distances from one, scaled embeddings, and
soft caps of attention's scores and of the logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer
from termgen.vocabulary.cache_groups import Window


class Gemma2Layer(DecoderLayer):
    """The outputs of attention and MLP are normalised before they are added to the residual."""

    norm_offset = 1.0

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self.post_attention_norm, self.post_mlp_norm = (
            self.make_norm(config, build, config.post_norm_eps) for _ in range(2)
        )
        self.pre_mlp_norm = self.make_norm(config, build)

    def after_attention(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        output = self.o_proj(attended.flatten(1))
        normed = self.post_attention_norm.norm_add(output, residual, self.pre_mlp_norm)
        return self.post_mlp_norm.norm_add(self.mlp(normed), residual, self.place.next_norm)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield self.pre_mlp_norm.weight_slot(f"{prefix}.pre_feedforward_layernorm.weight")
        yield self.post_mlp_norm.weight_slot(f"{prefix}.post_feedforward_layernorm.weight")


class Gemma2ForCausalLM(CausalDecoder):
    layer_class: type[DecoderLayer] = Gemma2Layer

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        # The model was trained with the factor rounded to its type.
        scale = torch.tensor(math.sqrt(self.config.hidden_size), dtype=self.dtype).item()
        return super().embed(input_ids).mul_(scale)
