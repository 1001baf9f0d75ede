"""The MLP of a decoder layer: gated, down(act(gate(x)) * up(x)), or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.weight_slot import WeightSlot, parameter_slot


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._activation = config.hidden_act
        self._ops = build.ops
        gate_up = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(hidden, gate_up, bias=bias, build=build)
        self.down_proj = Linear(inner, {"down_proj": hidden}, bias=bias, build=build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]"""
        activated = self._ops.gated_activation(self.gate_up_proj(x), self._activation)
        y: torch.Tensor = self.down_proj(activated)
        return y

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """prefix: the checkpoint's path of the layer."""
        yield from self.gate_up_proj.weight_slots(f"{prefix}.mlp")
        yield from self.down_proj.weight_slots(f"{prefix}.mlp")


class SparseMoe(nn.Module):
    """Checkpoints hold the experts one by one under the family's own names, or stacked as here
    under names that all families share: the forms of `WeightSlot.pieces`."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "a layer without experts"
        hidden, inner, num = config.hidden_size, moe.intermediate_size, moe.num_experts
        self._moe = moe
        self._activation = config.hidden_act
        self._ops = build.ops
        self.router = Linear(hidden, {"gate": num}, bias=False, build=build)
        self.gate_up = build.parameter(num, 2 * inner, hidden)
        self.down = build.parameter(num, hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]"""
        return self._ops.experts(
            x,
            self.router(x),
            self.gate_up,
            self.down,
            top_k=self._moe.num_experts_per_tok,
            renormalize=self._moe.norm_topk_prob,
            activation=self._activation,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """prefix: the checkpoint's path of the layer."""
        yield from self._router_slots(prefix)
        names = self._moe.names
        inner = self._moe.intermediate_size
        pieces: tuple[list[WeightSlot], list[WeightSlot]] = ([], [])
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            path = f"{prefix}.{names.block}.experts.{expert}"
            pieces[0].append(_slot(f"{path}.{names.gate}.weight", gate_up[:inner]))
            pieces[0].append(_slot(f"{path}.{names.up}.weight", gate_up[inner:]))
            pieces[1].append(_slot(f"{path}.{names.down}.weight", down))
        yield _slot(f"{prefix}.mlp.experts.gate_up_proj", self.gate_up, *pieces[0])
        yield _slot(f"{prefix}.mlp.experts.down_proj", self.down, *pieces[1])

    def _router_slots(self, prefix: str) -> Iterator[WeightSlot]:
        (slot,) = self.router.weight_slots(f"{prefix}.mlp")
        (other,) = self.router.weight_slots(f"{prefix}.{self._moe.names.block}")
        yield slot if other.name == slot.name else replace(slot, pieces=(other,))


def _slot(name: str, part: torch.Tensor, *pieces: WeightSlot) -> WeightSlot:
    return replace(parameter_slot(name, part, "matrix"), pieces=pieces)
