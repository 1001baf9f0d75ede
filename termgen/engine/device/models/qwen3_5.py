"""Qwen3.5: gated delta nets in three layers of four, and attention whose output has a gate.

Norm weights are distances from one, but for that of the delta nets' own norm. A part of each head
of q and k is rotated. What a delta net does depends on rows and their lengths, as attention does,
so the pass is not cut into pieces (`CausalDecoder.can_be_cut`). Larger models have experts in the
place of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels.recurrent.layout import CONV_TAPS
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.norm import HeadNorm
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot, empty_parameter, parameter_slot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer
from termgen.engine.device.models.mlp import GatedMLP, SparseMoe
from termgen.engine.device.models.pieces import Carried
from termgen.engine.device.recurrent.base import GatedDeltaWeights
from termgen.vocabulary.cache_groups import Window


class SharedExpertMoe(SparseMoe):
    """Experts, and one of another shape through which every token goes, times the sigmoid of a
    gate."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        inner = self.moe.shared_intermediate_size
        assert inner is not None
        self.shared = GatedMLP(replace(config, intermediate_size=inner), build)
        self.shared_gate = build.parameter(1, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.linear(x, self.shared_gate).sigmoid()  # [T, 1]
        shared: torch.Tensor = self.shared(x)
        return super().forward(x) + shared.mul_(gate)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        path = f"{prefix}.mlp.shared_expert"
        yield from self.shared.gate_up_proj.weight_slots(path)
        yield from self.shared.down_proj.weight_slots(path)
        yield parameter_slot(f"{path}_gate.weight", self.shared_gate, "matrix")


class _Layer(DecoderLayer):
    norm_offset = 1.0

    @classmethod
    def make_mlp(cls, config: ModelConfig, build: Build) -> GatedMLP | SparseMoe:
        if config.moe is None:
            return GatedMLP(config, build)
        if config.moe.has_shared_of_same_size:
            return SparseMoe(config, build)
        return SharedExpertMoe(config, build)


class Qwen3_5Layer(_Layer):
    """Attention, each head of whose output is multiplied by the sigmoid of a gate.

    A checkpoint has the rows of queries and gates in one q_proj, head by head; here the gates are
    the last rows of the fused projection.
    """

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self.qk_norm = HeadNorm(config, build, offset=self.norm_offset)
        self._head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        self._sizes = [self.qkv_proj.out_features - q_size, q_size]

    @classmethod
    def make_projections(cls, config: ModelConfig, build: Build) -> tuple[Linear, Linear]:
        hidden, dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, "gate": q_size}
        return (
            Linear(hidden, qkv, bias=config.qkv_bias, build=build),
            Linear(q_size, {"o_proj": hidden}, bias=config.o_bias, build=build),
        )

    def qk_norm_weight(self) -> torch.Tensor:
        return self.qk_norm.weight

    def forward(self, normed: torch.Tensor, carried: Carried, ctx: ForwardContext) -> torch.Tensor:
        qkv, gate = self.qkv_proj(normed).split(self._sizes, 1)
        q = self.rotate_and_store(qkv, carried, ctx)
        attended = self.attend(q, ctx).flatten(1).mul_(gate.sigmoid())
        return self.finish(attended, carried, ctx.wanted)

    def store(self, normed: torch.Tensor, carried: Carried, ctx: ForwardContext) -> None:
        self.rotate_and_store(self.qkv_proj(normed).split(self._sizes, 1)[0], carried, ctx)

    def projection_slots(self, prefix: str) -> Iterator[WeightSlot]:
        slots = {slot.name: slot for slot in super().projection_slots(prefix)}
        for kind in ("weight", "bias"):
            gate = slots.pop(f"{prefix}.self_attn.gate.{kind}", None)
            if gate is not None:
                name = f"{prefix}.self_attn.q_proj.{kind}"
                slots[name] = _taking_turns(slots[name], gate, self._head_dim)
        yield from slots.values()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield from self.qk_norm.weight_slots(f"{prefix}.self_attn")


def _taking_turns(first: WeightSlot, second: WeightSlot, rows: int) -> WeightSlot:
    """A slot under the first one's name for a tensor where so many rows of one and of the other
    take turns. Stored rows come in parts of any size."""

    def load(tensor: torch.Tensor) -> None:
        pairs = tensor.view(-1, 2, rows, *tensor.shape[1:])
        first.load(pairs[:, 0].flatten(0, 1))
        second.load(pairs[:, 1].flatten(0, 1))

    def load_stored(stored: StoredRows, begin: int) -> None:
        done = 0
        while done < len(stored.blocks):
            turn, place = divmod(begin + done, rows)
            count = min(rows - place, len(stored.blocks) - done)
            slot = (first, second)[turn % 2]
            assert slot.load_stored is not None, slot.name
            part = replace(stored, blocks=stored.blocks[done : done + count])
            slot.load_stored(part, turn // 2 * rows + place)
            done += count

    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    kinds = first.kinds & second.kinds
    return WeightSlot(first.name, shape, first.role, load, None, kinds, load_stored)


class Qwen3_5DeltaLayer(_Layer):
    """A gated delta net in the place of attention. It processes all tokens: later ones depend on
    the state that each leaves."""

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        linear = config.linear
        assert linear is not None
        heads, channels = linear.num_v_heads, linear.num_channels
        self._sizes = [channels, heads * linear.v_dim, heads, heads]

        def float32(*shape: int) -> torch.nn.Parameter:
            return empty_parameter(*shape, dtype=torch.float32, device=build.device)

        # Channels side by side: see `recurrent.base.tap_major`.
        self.conv = build.parameter(CONV_TAPS, channels)
        self.a_log, self.dt_bias = float32(heads), float32(heads)
        self.norm = build.parameter(linear.v_dim)
        self._weights = GatedDeltaWeights(self.conv.t(), self.a_log, self.dt_bias)

    @classmethod
    def make_projections(cls, config: ModelConfig, build: Build) -> tuple[Linear, Linear]:
        linear = config.linear
        assert linear is not None
        heads, v_size = linear.num_v_heads, linear.num_v_heads * linear.v_dim
        into = {
            "in_proj_qkv": linear.num_channels,
            "in_proj_z": v_size,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        return (
            Linear(config.hidden_size, into, bias=False, build=build),
            Linear(v_size, {"out_proj": config.hidden_size}, bias=False, build=build),
        )

    def forward(self, normed: torch.Tensor, carried: Carried, ctx: ForwardContext) -> torch.Tensor:
        net, step = self.place.recurrent, ctx.recurrent
        assert net is not None and step is not None, "a step without recurrent states"
        mixed, z, b, a = self.qkv_proj(normed).split(self._sizes, 1)
        state = step.states[self.place.index]
        o = net.gated_delta(mixed, a, b, self._weights, state, step.metadata)
        return self.finish(net.gated_norm(o, z, self.norm, self._eps), carried, ctx.wanted)

    def projection_slots(self, prefix: str) -> Iterator[WeightSlot]:
        path = f"{prefix}.linear_attn"
        yield from self.qkv_proj.weight_slots(path)
        yield self._conv_slot(f"{path}.conv1d.weight")
        yield parameter_slot(f"{path}.A_log", self.a_log, "bias")
        yield parameter_slot(f"{path}.dt_bias", self.dt_bias, "bias")
        yield parameter_slot(f"{path}.norm.weight", self.norm, "norm")
        yield from self.o_proj.weight_slots(path)

    def _conv_slot(self, name: str) -> WeightSlot:
        taps, channels = self.conv.shape

        def load(tensor: torch.Tensor) -> None:
            self.conv.copy_(tensor[:, 0].t())

        return WeightSlot(name, (channels, 1, taps), "matrix", load)


class Qwen3_5ForCausalLM(CausalDecoder):
    layer_class = Qwen3_5Layer
    recurrent_class = Qwen3_5DeltaLayer
