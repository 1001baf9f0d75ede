"""gpt-oss: attention sinks, and experts with biases whose gates are clamped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.weight_slot import WeightSlot, empty_parameter, parameter_slot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer
from termgen.engine.device.models.mlp import SparseMoe, transposed_slot
from termgen.vocabulary.cache_groups import Window


class GptOssMoe(SparseMoe):
    """A checkpoint has the experts in tensors [num_experts, in, out], where gate and up take turns;
    here they are as for other families."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        path = f"{prefix}.{self.moe.names.block}"
        yield from self.router.weight_slots(path)
        assert self.gate_up_bias is not None and self.down_bias is not None
        gate_up, down = f"{path}.experts.gate_up_proj", f"{path}.experts.down_proj"
        num = self.moe.num_experts
        yield transposed_slot(gate_up, self.gate_up, num, _apart)
        yield _bias_slot(f"{gate_up}_bias", self.gate_up_bias, _apart)
        yield transposed_slot(down, self.down, num)
        yield _bias_slot(f"{down}_bias", self.down_bias, lambda tensor: tensor)


def _apart(rows: torch.Tensor) -> torch.Tensor:
    """rows [n, 2 * inner, ...]: gate and up taking turns -> those of gate, then those of up."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def _bias_slot(
    name: str, biases: torch.Tensor, ordered: Callable[[torch.Tensor], torch.Tensor]
) -> WeightSlot:
    def load(tensor: torch.Tensor) -> None:
        biases.copy_(ordered(tensor))

    return WeightSlot(name, tuple(biases.shape), "bias", load)


class GptOssLayer(DecoderLayer):
    norms_in_float32 = True

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self.sinks = empty_parameter(config.num_heads, dtype=torch.float32, device=build.device)
        self.form = replace(self.form, sinks=self.sinks)

    @classmethod
    def make_mlp(cls, config: ModelConfig, build: Build) -> GptOssMoe:
        return GptOssMoe(config, build)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield parameter_slot(f"{prefix}.self_attn.sinks", self.sinks, "bias")


class GptOssForCausalLM(CausalDecoder):
    layer_class = GptOssLayer
