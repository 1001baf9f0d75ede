"""Gemma 4: layers that differ in shape, and have inputs of their own in small models.

Layers without a window have larger heads and may take their keys for values. The sum after a layer
is scaled by a number of the layer. Larger models have experts beside each MLP.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.norm import RMSNorm
from termgen.engine.device.layers.weight_slot import (
    WeightSlot,
    empty_parameter,
    parameter_slot,
)
from termgen.engine.device.models.decoder import DecoderLayer
from termgen.engine.device.models.layer_inputs import LayerWithInput, ModelWithInputs
from termgen.engine.device.models.mlp import SparseMoe, stack_slot
from termgen.engine.device.models.pieces import Carried
from termgen.vocabulary.cache_groups import Window


class Gemma4Layer(LayerWithInput):
    scale: float
    """The value of `layer_scalar`, once that is loaded."""

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self.layer_scalar = build.parameter(1)
        self.experts: Gemma4Experts | None = None
        if config.moe is not None:
            self.experts = Gemma4Experts(config, build)
            self.post_mlp_norm_1 = self.make_norm(config, build)
            self.post_experts_norm = self.make_norm(config, build)

    def finish(
        self, attended: torch.Tensor, carried: Carried, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        residual, inputs = carried.residual, carried.per_layer
        if inputs is not None:
            inputs = inputs[:, self.number]
        if wanted is not None and self.place.is_last:
            attended, residual = attended[wanted], residual[wanted]
            inputs = None if inputs is None else inputs[wanted]
        output = self.o_proj(attended.flatten(1))
        normed = self.post_attention_norm.norm_add(output, residual, self.pre_mlp_norm)
        y = self.mlp(normed)
        if self.experts is not None:
            y = self.post_mlp_norm_1(y).add_(self.post_experts_norm(self.experts(residual)))
        last_norm, next_norm = self.post_mlp_norm, self.place.next_norm
        if inputs is not None:
            residual.add_(last_norm(y))
            y = self.gated_input(residual, inputs)
            last_norm = self.post_input_norm
        return last_norm.norm_add(y, residual, next_norm, self.scale)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield parameter_slot(f"{prefix}.layer_scalar", self.layer_scalar, "bias")
        if self.experts is not None:
            yield from self.experts.weight_slots(prefix)
            norm = f"{prefix}.post_feedforward_layernorm"
            yield self.post_mlp_norm_1.weight_slot(f"{norm}_1.weight")
            yield self.post_experts_norm.weight_slot(f"{norm}_2.weight")


class Gemma4Experts(SparseMoe):
    """Experts beside the MLP. They and their router start from the sum before the MLP, each with a
    norm of its own; every expert has a factor of its output."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        assert config.moe is not None
        self._eps = config.rms_norm_eps
        self.pre_norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, build=build, in_float32=True
        )

        def float32(size: int) -> nn.Parameter:
            return empty_parameter(size, dtype=torch.float32, device=build.device)

        # Kept with the factor of the router's input, hidden_size ** -0.5.
        self.router_scale = float32(config.hidden_size)
        self.expert_scale = float32(config.moe.num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], not normalised -> [T, hidden]"""
        routed = self._ops.rms_norm(x, self.router_scale, self._eps)
        return self._run(
            self.pre_norm(x),
            self.router(routed),
            self.gate_up,
            self.down,
            top_k=self.moe.num_experts_per_tok,
            renormalize=True,
            activation=self.activation,
            expert_scale=self.expert_scale,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        def load_scale(tensor: torch.Tensor) -> None:
            self.router_scale.copy_(tensor).mul_(len(self.router_scale) ** -0.5)

        path = f"{prefix}.router"
        yield from self.router.weight_slots(path)
        yield WeightSlot(f"{path}.scale", tuple(self.router_scale.shape), "norm", load_scale)
        yield parameter_slot(f"{path}.per_expert_scale", self.expert_scale, "bias")
        yield self.pre_norm.weight_slot(f"{prefix}.pre_feedforward_layernorm_2.weight")
        num = self.moe.num_experts
        yield stack_slot(f"{prefix}.experts.gate_up_proj", self.gate_up, num)
        yield stack_slot(f"{prefix}.experts.down_proj", self.down, num)


class Gemma4ForCausalLM(ModelWithInputs):
    layer_class: type[DecoderLayer] = Gemma4Layer

    def finalize(self) -> None:
        super().finalize()
        for layer in self.layers:
            assert isinstance(layer, Gemma4Layer)
            layer.scale = layer.layer_scalar.item()
