"""gpt-oss: attention sinks, and experts with biases whose gates are clamped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot, empty_parameter, parameter_slot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer
from termgen.engine.device.models.mlp import Matrices, SparseMoe
from termgen.vocabulary.cache_groups import Window


class GptOssMoe(SparseMoe):
    """A checkpoint has the experts in tensors [num_experts, in, out], where gate and up take turns;
    here they are as for other families."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        path = f"{prefix}.{self._moe.names.block}"
        yield from self.router.weight_slots(path)
        assert self.gate_up_bias is not None and self.down_bias is not None
        gate_up, down = f"{path}.experts.gate_up_proj", f"{path}.experts.down_proj"
        yield _experts_slot(gate_up, self.gate_up, _apart)
        yield _bias_slot(f"{gate_up}_bias", self.gate_up_bias, _apart)
        yield _experts_slot(down, self.down, lambda tensor: tensor)
        yield _bias_slot(f"{down}_bias", self.down_bias, lambda tensor: tensor)


def _apart(rows: torch.Tensor) -> torch.Tensor:
    """rows [n, 2 * inner, ...]: gate and up taking turns -> those of gate, then those of up."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def _experts_slot(
    name: str, experts: Matrices, ordered: Callable[[torch.Tensor], torch.Tensor]
) -> WeightSlot:
    """A slot for experts [num_experts, out, in]; one after another, for a layer may be gigabytes"""
    num_experts, size_out, size_in = experts.shape

    def load_some(tensor: torch.Tensor, first: int) -> None:
        for number, matrix in enumerate(tensor, first):
            experts[number] = ordered(matrix.T[None])[0]

    def load(tensor: torch.Tensor) -> None:
        load_some(tensor, 0)

    slot = WeightSlot(name, (num_experts, size_in, size_out), "matrix", load, load_some)
    if not isinstance(experts, ExpertList):
        return slot

    def load_stored(rows: StoredRows, first: int) -> None:
        """Rows of whole experts, [out, in], counted through all."""
        for place, matrix in enumerate(torch.split(rows.blocks, size_out)):
            blocks = ordered(matrix[None])[0]
            experts.load_stored(first // size_out + place, StoredRows(rows.kind, blocks))

    return replace(slot, kinds=experts.kinds, load_stored=load_stored)


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
