"""The second half of a layer: a gated MLP, or experts of which a router picks a few."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot, rows_slot


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._activation = config.hidden_act
        self._block = config.mlp_block
        self._ops = build.ops
        gate_up = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(hidden, gate_up, bias=bias, build=build)
        self.down_proj = Linear(inner, {"down_proj": hidden}, bias=bias, build=build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]"""
        activated = self.gate_up_proj.gated(x, self._activation, self._ops)
        y: torch.Tensor = self.down_proj(activated)
        return y

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """prefix: the checkpoint's path of the layer."""
        yield from self.gate_up_proj.weight_slots(f"{prefix}.{self._block}")
        yield from self.down_proj.weight_slots(f"{prefix}.{self._block}")


class SparseMoe(nn.Module):
    """Checkpoints hold the experts one by one under the family's own names, or stacked as here
    under names that all families share: the forms of `WeightSlot.pieces`. An expert of all tokens,
    if it has the others' shape, is the last matrix."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "a layer without experts"
        hidden, inner, num = config.hidden_size, moe.intermediate_size, moe.num_experts
        self.moe = moe
        self._block = config.mlp_block
        self.activation = config.hidden_act
        self._ops = build.ops
        self._run: Callable[..., torch.Tensor] = build.ops.experts
        router = {moe.names.router: num}
        num_matrices = num
        if moe.has_shared_of_same_size:
            num_matrices += 1
            if not moe.weighs_inputs:
                router["shared_expert_gate"] = 1
        self.gate_up = _matrices((num_matrices, 2 * inner, hidden), build)
        self.down = _matrices((num_matrices, hidden, inner), build)
        self.router = Linear(hidden, router, bias=moe.has_biases, build=build.for_routers)
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if moe.has_biases:
            self.gate_up_bias = build.parameter(num, 2 * inner)
            self.down_bias = build.parameter(num, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]"""
        return self._run(
            x,
            self.router(x),
            self.gate_up,
            self.down,
            top_k=self.moe.num_experts_per_tok,
            renormalize=self.moe.norm_topk_prob,
            activation=self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            clamp=self.moe.clamp,
            has_shared=self.moe.has_shared_of_same_size,
            weighs_inputs=self.moe.weighs_inputs,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """prefix: the checkpoint's path of the layer."""
        yield from self._router_slots(prefix)
        num = self.moe.num_experts
        pieces: tuple[list[WeightSlot], list[WeightSlot]] = ([], [])
        for expert in range(num):
            path = f"{prefix}.{self.moe.names.block}.experts.{expert}"
            *gate_up, down = self._expert_slots(path, expert)
            pieces[0].extend(gate_up)
            pieces[1].append(down)
        yield stack_slot(
            f"{prefix}.{self._block}.experts.gate_up_proj", self.gate_up, num, *pieces[0]
        )
        yield stack_slot(f"{prefix}.{self._block}.experts.down_proj", self.down, num, *pieces[1])
        if self.moe.has_shared_of_same_size:
            yield from self._expert_slots(f"{prefix}.{self._block}.shared_expert", num)

    def _expert_slots(self, path: str, expert: int) -> Iterator[WeightSlot]:
        """Gate, up and down of one expert."""
        names, inner = self.moe.names, self.moe.intermediate_size
        yield expert_slot(f"{path}.{names.gate}.weight", self.gate_up, expert, 0, inner)
        yield expert_slot(f"{path}.{names.up}.weight", self.gate_up, expert, inner, inner)
        yield expert_slot(f"{path}.{names.down}.weight", self.down, expert, 0, self.down.shape[1])

    def _router_slots(self, prefix: str) -> Iterator[WeightSlot]:
        slots = self.router.weight_slots(f"{prefix}.{self._block}")
        others = self.router.weight_slots(f"{prefix}.{self.moe.names.block}")
        for slot, other in zip(slots, others, strict=True):
            yield slot if other.name == slot.name else replace(slot, pieces=(other,))


Matrices = nn.Parameter | ExpertList
"""Floats in one tensor, or stored otherwise."""


def _matrices(shape: tuple[int, int, int], build: Build) -> Matrices:
    if build.make_experts is None:
        return build.parameter(*shape)
    made = build.make_experts(shape, build)
    assert isinstance(made, ExpertList), made
    return made


def expert_slot(
    name: str, matrices: Matrices, expert: int, first_row: int, num_rows: int
) -> WeightSlot:
    """Some rows of one expert's matrix."""
    if isinstance(matrices, ExpertList):
        return matrices.rows_slot(name, expert, first_row, num_rows)
    return rows_slot(name, matrices[expert, first_row : first_row + num_rows])


def transposed_slot(
    name: str,
    matrices: Matrices,
    num: int,
    ordered: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *pieces: WeightSlot,
) -> WeightSlot:
    """The matrices of the first `num` experts, each [in, out] in the checkpoint; one after another,
    for a layer may be gigabytes. ordered: what puts rows [1, out, in] in their places."""
    _, size_out, size_in = matrices.shape

    def load_some(tensor: torch.Tensor, first: int) -> None:
        for number, matrix in enumerate(tensor, first):
            matrices[number] = matrix.T if ordered is None else ordered(matrix.T[None])[0]

    def load(tensor: torch.Tensor) -> None:
        load_some(tensor, 0)

    shape = (num, size_in, size_out)
    slot = WeightSlot(name, shape, "matrix", load, load_some, pieces=pieces)
    if not isinstance(matrices, ExpertList):
        return slot

    def load_stored(rows: StoredRows, first: int) -> None:
        """Rows of whole experts, [out, in], counted through all."""
        for place, matrix in enumerate(torch.split(rows.blocks, size_out)):
            blocks = matrix if ordered is None else ordered(matrix[None])[0]
            matrices.load_stored(first // size_out + place, StoredRows(rows.kind, blocks))

    return replace(slot, kinds=matrices.transposed_kinds, load_stored=load_stored)


def stack_slot(name: str, matrices: Matrices, num: int, *pieces: WeightSlot) -> WeightSlot:
    """The matrices of the first `num` experts."""
    if isinstance(matrices, ExpertList):
        return matrices.stack_slot(name, num, *pieces)
    return rows_slot(name, matrices[:num], *pieces)
