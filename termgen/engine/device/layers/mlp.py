"""The gated MLP of a decoder layer: down(act(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from termgen.engine.device.layers.linear import GateUpLinear, LinearMethodFactory, RowLinear
from termgen.engine.device.layers.ops import LayerOps
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.config import ModelConfig


class GatedMLP(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethodFactory,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._activation = config.hidden_act
        self._ops = ops
        self.gate_up_proj = GateUpLinear(
            hidden, inner, bias=bias, dtype=dtype, device=device, method=method
        )
        self.down_proj = RowLinear(
            inner, hidden, name="down_proj", bias=bias, dtype=dtype, device=device, method=method
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]"""
        activated = self._ops.gated_activation(self.gate_up_proj(x), self._activation)
        y: torch.Tensor = self.down_proj(activated)
        return y

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """prefix: the checkpoint's path of the layer."""
        yield from self.gate_up_proj.weight_slots(f"{prefix}.mlp")
        yield from self.down_proj.weight_slots(f"{prefix}.mlp")
