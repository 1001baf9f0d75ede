"""Muse Glimmer: as Gemma 2, but attention has a gate, heads of q and k are normalised without
weights, some layers do not rotate, and rows of the embedding are normalised."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.norm import RMSNorm
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer
from termgen.engine.device.models.gemma2 import Gemma2Layer
from termgen.engine.device.models.pieces import Carried
from termgen.engine.device.recurrent.base import GatedDeltaNet
from termgen.vocabulary.cache_groups import Window


class MuseGlimmerLayer(Gemma2Layer):
    """The gate is computed from the layer's input, which is gone when attention is over, so it
    waits in `carried`. The factor of normalised queries is part of `config.attention_scale`."""

    ones: torch.Tensor  # [num_heads + num_kv_heads, head_dim]

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        size = config.num_heads * config.head_dim
        self.gate_proj = Linear(config.hidden_size, {"gate_proj": size}, bias=False, build=build)
        heads = config.num_heads + config.num_kv_heads
        self.register_buffer("ones", _ones(build, heads, config.head_dim), persistent=False)

    def qk_norm_weight(self) -> torch.Tensor:
        return self.ones

    def before_attention(
        self,
        normed: torch.Tensor,
        carried: Carried,
        ctx: ForwardContext,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        carried.gate = self.gate_proj(normed)
        return super().before_attention(normed, carried, ctx, q)

    def finish(
        self, attended: torch.Tensor, carried: Carried, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        gate, carried.gate = carried.gate, None
        assert gate is not None, "before_attention must come first"
        gated = self._ops.sigmoid_gate(attended.flatten(1), gate)
        return super().finish(gated, carried, wanted)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield from self.gate_proj.weight_slots(f"{prefix}.self_attn")


def _ones(build: Build, *shape: int) -> torch.Tensor:
    """The weights of norms that have none, in the type with which a result is rounded once."""
    return torch.ones(shape, dtype=torch.float32, device=build.device)


class MuseGlimmerForCausalLM(CausalDecoder):
    layer_class: type[DecoderLayer] = MuseGlimmerLayer
    ones: torch.Tensor  # [hidden_size]

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        attention: GroupedAttention,
        recurrent: GatedDeltaNet | None = None,
    ) -> None:
        super().__init__(config, build, attention, recurrent)
        self.register_buffer("ones", _ones(build, config.hidden_size), persistent=False)

    @classmethod
    def make_final_norm(cls, config: ModelConfig, build: Build) -> RMSNorm:
        # Unlike those of the layers, its weight is no distance from one.
        return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, build=build, in_float32=True)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(super().embed(input_ids), self.ones, self.config.rms_norm_eps)
