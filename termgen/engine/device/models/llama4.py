"""Llama 4: heads of q and k are normalised without weights where they rotate; where they do not,
queries grow with their position. Experts take inputs times their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer
from termgen.engine.device.models.mlp import GatedMLP, SparseMoe, stack_slot, transposed_slot
from termgen.engine.device.models.pieces import Carried
from termgen.engine.device.recurrent.base import GatedDeltaNet
from termgen.vocabulary.cache_groups import Window


class Llama4Moe(SparseMoe):
    """A checkpoint has the experts in tensors [num_experts, in, out], and a GGUF file in such of
    [num_experts, out, in]; or they come one by one."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        num, path = self.moe.num_experts, f"{prefix}.{self._block}"
        yield from self.router.weight_slots(path)
        pieces = [list(self._expert_slots(f"{path}.experts.{i}", i)) for i in range(num)]
        gate_up = [piece for (*gate_up, _) in pieces for piece in gate_up]
        down = [piece for (*_, piece) in pieces]
        for name, matrices, single in (
            (f"{path}.experts.gate_up_proj", self.gate_up, gate_up),
            (f"{path}.experts.down_proj", self.down, down),
        ):
            stacked = stack_slot(f"{name}.weight", matrices, num, *single)
            yield transposed_slot(name, matrices, num, None, stacked)
        yield from self._expert_slots(f"{path}.shared_expert", num)


class Llama4Layer(DecoderLayer):
    """Rotation turns a checkpoint's pairs of neighbours in a head of q and k. Here these lie half a
    head apart, as in other families: scores and norms do not depend on the order within a head."""

    ones: torch.Tensor  # [num_heads + num_kv_heads, head_dim] float32
    rotates: bool
    """Set by the model, as `place` is."""

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self._has_qk_norm = config.qk_norm
        heads = config.num_heads + config.num_kv_heads
        ones = torch.ones(heads, config.head_dim, dtype=torch.float32, device=build.device)
        self.register_buffer("ones", ones, persistent=False)

    @classmethod
    def make_mlp(cls, config: ModelConfig, build: Build) -> GatedMLP | SparseMoe:
        return GatedMLP(config, build) if config.moe is None else Llama4Moe(config, build)

    def qk_norm_weight(self) -> torch.Tensor | None:
        return self.ones if self._has_qk_norm and self.rotates else None

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        carried: Carried,
        ctx: ForwardContext,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = super().rotate_and_store(qkv, carried, ctx, q)
        if self.rotates or carried.temperature is None:
            return q
        return q.mul_(carried.temperature)

    def projection_slots(self, prefix: str) -> Iterator[WeightSlot]:
        for slot in super().projection_slots(prefix):
            is_rotated = ".q_proj." in slot.name or ".k_proj." in slot.name
            yield _in_halves(slot, self.head_dim) if is_rotated else slot


def _in_halves(slot: WeightSlot, head_dim: int) -> WeightSlot:
    """The same slot for rows in pairs: the first of each pair go to a head's first half."""

    def in_halves(rows: torch.Tensor) -> torch.Tensor:
        pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).flatten(0, 2)

    def load(tensor: torch.Tensor) -> None:
        slot.load(in_halves(tensor))

    parts: list[torch.Tensor] = []

    def load_stored(rows: StoredRows, first: int) -> None:
        parts.append(rows.blocks)
        if first + len(rows.blocks) == slot.shape[0]:  # a part may end inside a head
            assert slot.load_stored is not None
            slot.load_stored(replace(rows, blocks=in_halves(torch.cat(parts))), 0)
            parts.clear()

    return replace(slot, load=load, load_rows=None, load_stored=load_stored)


class Llama4ForCausalLM(CausalDecoder):
    layer_class: type[DecoderLayer] = Llama4Layer

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        attention: GroupedAttention,
        recurrent: GatedDeltaNet | None = None,
    ) -> None:
        super().__init__(config, build, attention, recurrent)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Llama4Layer)
            layer.rotates = index not in config.unrotated_layers

    def begin(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Carried:
        carried = super().begin(input_ids, positions)
        if (tuned := self.config.temperature) is not None:
            whole = ((positions.float() + 1.0) / tuned.interval).floor_()
            factors = whole.log1p_().mul_(tuned.scale).add_(1.0)
            carried.temperature = factors[:, None, None]
        return carried
