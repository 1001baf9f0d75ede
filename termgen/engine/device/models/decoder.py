"""The decoder: embedding, layers of attention and MLP or experts, norm, head.

`CausalDecoder.forward` is the whole pass. Families whose difference is in their config are this
class as it is; one with other arithmetic derives from it in its own file. A layer is two halves
with attention between them, so that the halves can be recorded as graphs while attention runs
eagerly. What a step needs travels as a `ForwardContext` argument; nothing is global. The caller
holds `torch.inference_mode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from termgen.engine.device.attention.base import AttentionBackend, ForwardContext
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build, Linear, VocabEmbedding
from termgen.engine.device.layers.norm import RMSNorm
from termgen.engine.device.layers.ops import inverse_frequencies
from termgen.engine.device.layers.weight_slot import WeightSlot, parameter_slot
from termgen.engine.device.models.pieces import Carried


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A layer's place in its model."""

    index: int
    """Its KV cache among those of the layers."""
    rope: int
    """Its rotation among those of a step."""
    attention: AttentionBackend
    next_norm: RMSNorm
    """The input norm of the next layer, or the norm after the last one."""
    is_last: bool


class DecoderLayer(nn.Module):
    """q/k/v, rotation | attention | output projection, norm, MLP or experts, next layer's norm."""

    norm_offset: float = 0.0
    """Added to the norm weights of a checkpoint."""
    place: Place
    """Set by the model, once it has made all layers."""

    def __init__(self, config: ModelConfig, build: Build, *, sliding_window: int | None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.scale = config.attention_scale
        self._num_heads = config.num_heads
        self._ops = build.ops
        self._eps = config.rms_norm_eps
        hidden, eps, offset = config.hidden_size, config.rms_norm_eps, self.norm_offset
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.input_norm = RMSNorm(hidden, eps=eps, build=build, offset=offset)
        self.qkv_proj = Linear(hidden, qkv, bias=config.qkv_bias, build=build)
        self.o_proj = Linear(q_size, {"o_proj": hidden}, bias=config.o_bias, build=build)
        self.post_attention_norm = RMSNorm(hidden, eps=eps, build=build, offset=offset)
        mlp_class = GatedMLP if config.moe is None else SparseMoe
        self.mlp = mlp_class(config, build)

    def forward(self, normed: torch.Tensor, carried: Carried, ctx: ForwardContext) -> torch.Tensor:
        """normed [T, hidden], this layer's input -> that of the next layer.

        Adds to `carried.residual` in place. An input is normalised already: one kernel adds a
        layer's output to the residual and normalises the sum for the next layer.
        """
        attended = self.attend(self.before_attention(normed, carried, ctx), ctx)
        return self.finish(attended, carried, ctx.wanted)

    def before_attention(
        self,
        normed: torch.Tensor,
        carried: Carried,
        ctx: ForwardContext,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """normed [T, hidden] -> q [T, num_heads, head_dim]; k and v go to their slots."""
        return self._ops.rotate_and_store(
            self.qkv_proj(normed),
            ctx.kv_caches[self.place.index],
            carried.rotations[self.place.rope],
            ctx.metadata.slot_mapping,
            num_heads=self._num_heads,
            norm_weight=self.qk_norm_weight(),
            eps=self._eps,
            q=q,
        )

    def qk_norm_weight(self) -> torch.Tensor | None:
        """[num_heads + num_kv_heads, head_dim] of a family that normalises q and k."""
        return None

    def attend(
        self, q: torch.Tensor, ctx: ForwardContext, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, num_heads, head_dim] from the same."""
        return self.place.attention.forward(
            q,
            ctx.kv_caches[self.place.index],
            ctx.metadata,
            scale=self.scale,
            sliding_window=self.sliding_window,
            out=out,
        )

    def finish(
        self, attended: torch.Tensor, carried: Carried, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """attended [T, num_heads, head_dim] -> the next layer's input [T, hidden]; the last layer
        computes the tokens `wanted` alone, [N, hidden]."""
        residual = carried.residual
        if wanted is not None and self.place.is_last:
            # No later token looks at what others become past the last keys and values.
            attended, residual = attended[wanted], residual[wanted]
        return self.after_attention(attended, residual)

    def after_attention(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed = self.post_attention_norm.add(self.o_proj(attended.flatten(1)), residual)
        return self.place.next_norm.add(self.mlp(normed), residual)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield self.input_norm.weight_slot(f"{prefix}.input_layernorm.weight")
        yield from self.qkv_proj.weight_slots(f"{prefix}.self_attn")
        yield from self.o_proj.weight_slots(f"{prefix}.self_attn")
        yield self.post_attention_norm.weight_slot(f"{prefix}.post_attention_layernorm.weight")
        yield from self.mlp.weight_slots(prefix)


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


class CausalDecoder(nn.Module):
    """A decoder-only language model over a paged KV cache: a `PiecewiseModel`."""

    layer_class: type[DecoderLayer] = DecoderLayer
    inverse_frequencies: torch.Tensor  # [num_ropes, rotary_dim / 2] float32

    def __init__(self, config: ModelConfig, build: Build, attention: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.dtype = build.dtype
        self.device = build.device
        self.attention = attention
        tied = config.tie_word_embeddings
        self.embedding: VocabEmbedding | None = None
        if not tied:
            self.embedding = VocabEmbedding(config.vocab_size, config.hidden_size, build)
        self._ops = build.ops
        self._ropes = tuple(dict.fromkeys(config.layer_ropes))
        frequencies = [inverse_frequencies(rope, config.head_dim) for rope in self._ropes]
        self.register_buffer(
            "inverse_frequencies", torch.stack(frequencies).to(self.device), persistent=False
        )
        layers = [
            self.layer_class(config.of_layer(index), build, sliding_window=window)
            for index, window in enumerate(config.layer_windows)
        ]
        # Typed as what it holds, which ModuleList does not say.
        self.layers = cast(list[DecoderLayer], nn.ModuleList(layers))
        self.norm = RMSNorm(
            config.hidden_size,
            eps=config.rms_norm_eps,
            build=build,
            offset=self.layer_class.norm_offset,
        )
        following = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            rope = self._ropes.index(config.layer_ropes[index])
            is_last = index == len(layers) - 1
            layer.place = Place(index, rope, attention, next_norm, is_last)
        self.head = Linear(
            config.hidden_size,
            {"model.embed_tokens" if tied else "lm_head": config.vocab_size},
            bias=False,
            build=build,
            is_looked_up=tied,
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """input_ids [T], positions [T] -> normed hidden states [N, hidden] of `ctx.wanted`.

        The attention backend must have prepared `ctx.metadata`.
        """
        carried = self._begin(input_ids, positions)
        normed: torch.Tensor = self.layers[0].input_norm(carried.residual)
        for layer in self.layers:
            normed = layer(normed, carried, ctx)
        return normed

    def _begin(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Carried:
        # Rotations first: the kernels of a layer may read them before the one ahead has ended,
        # which is safe after the embedding, a launch that waits for all before it.
        rotations = tuple(
            self._ops.rotation(positions, frequencies, rope.attention_factor)
            for frequencies, rope in zip(self.inverse_frequencies, self._ropes, strict=True)
        )
        return Carried(self.embed(input_ids), rotations)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.embedding is None:
            return self.head.embed(input_ids)
        rows: torch.Tensor = self.embedding(input_ids)
        return rows

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] -> [N, vocab_size], in the model's type."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor the model wants from a checkpoint, each exactly once."""
        if self.embedding is not None:
            yield self.embedding.weight_slot("model.embed_tokens.weight")
        for index, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{index}")
        yield self.norm.weight_slot("model.norm.weight")
        yield from self.head.weight_slots("")

    def ignored_weights(self) -> tuple[str, ...]:
        """Endings of names a checkpoint may hold that the model does not want."""
        ignored = ("rotary_emb.inv_freq",)
        return (*ignored, "lm_head.weight") if self.config.tie_word_embeddings else ignored

    def repeated_weights(self) -> dict[str, str]:
        """Ignored tensor -> the tensor that it must equal, if a checkpoint has both."""
        tied = self.config.tie_word_embeddings
        return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def finalize(self) -> None:
        """Prepares the loaded weights for the device. Called once, before the first step."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize()

    # The same forward pass in pieces, for recordings (`PiecewiseModel`): skip on a first reading.

    @property
    def can_be_recorded(self) -> bool:
        """True if CUDA graphs can hold what lies between attentions."""
        return self.config.moe is None or self._ops.can_record_experts

    @property
    def num_attentions(self) -> int:
        return len(self.layers)

    def first_piece(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        *,
        q: torch.Tensor | None = None,
    ) -> tuple[Carried, torch.Tensor]:
        carried, first = self._begin(input_ids, positions), self.layers[0]
        normed = first.input_norm(carried.residual)
        return carried, first.before_attention(normed, carried, ctx, q)

    def attend(
        self,
        index: int,
        q: torch.Tensor,
        ctx: ForwardContext,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.layers[index].attend(q, ctx, out=out)

    def next_piece(
        self,
        index: int,
        attended: torch.Tensor,
        carried: Carried,
        ctx: ForwardContext,
        *,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.layers[index].after_attention(attended, carried.residual)
        return self.layers[index + 1].before_attention(normed, carried, ctx, q)

    def last_piece(
        self, attended: torch.Tensor, carried: Carried, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        return self.layers[-1].finish(attended, carried, wanted)


@contextmanager
def one_layer_of_each_kind(model: object) -> Iterator[None]:
    """Skip the other layers of a `CausalDecoder`: layers of one kind run the same kernels on the
    same shapes, so a step through one rehearses all in a fraction of the time. The last layer
    stays, as it computes only the tokens whose hidden states are wanted."""
    if not isinstance(model, CausalDecoder):
        yield  # other models keep all their layers
        return
    layers = model.layers
    kinds: dict[object, DecoderLayer] = {}
    for layer in layers:
        weights = [
            (name, p.shape, p.dtype, p.data_ptr() % 16 == 0) for name, p in layer.named_parameters()
        ]
        kinds.setdefault((type(layer), layer.sliding_window, *weights), layer)
    others = [layer for layer in kinds.values() if layer is not layers[-1]]
    model.layers = cast(list[DecoderLayer], nn.ModuleList([*others, layers[-1]]))
    try:
        yield
    finally:
        model.layers = layers
