"""The decoder: embedding, layers of attention and MLP or experts, norm, head.

`CausalDecoder.forward` is the whole pass. Families whose difference is in their config are this
class as it is; one with other arithmetic derives from it in its own file. A layer is two halves
with attention between them, so that the halves can be recorded as graphs while attention runs
eagerly. What a step needs travels as a `ForwardContext` argument; nothing is global. The caller
holds `torch.inference_mode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from termgen.engine.device.attention.base import AttentionBackend, AttentionForm, ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build, Linear, VocabEmbedding
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.layers.norm import RMSNorm
from termgen.engine.device.layers.ops import inverse_frequencies
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.mlp import GatedMLP, SparseMoe
from termgen.engine.device.models.pieces import Carried
from termgen.engine.device.recurrent.base import GatedDeltaNet
from termgen.vocabulary.cache_groups import Window
from termgen.vocabulary.device.kv_cache_types import LayerScales


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A layer's place in its model."""

    index: int
    """The KV cache that it reads, among those of the layers that have their own; the state of a
    recurrent layer among those of all such."""
    group: int
    """Its block table and slots among those of the groups; 0 for a recurrent layer."""
    rope: int
    """Its rotation among those of a step."""
    attention: AttentionBackend | None
    """None for a recurrent layer."""
    recurrent: GatedDeltaNet | None
    """None for a layer that has attention."""
    next_norm: RMSNorm
    """The input norm of the next layer, or the norm after the last one."""
    is_last: bool


class DecoderLayer(nn.Module):
    """q/k/v, rotation | attention | output projection, norm, MLP or experts, next layer's norm."""

    norm_offset: float = 0.0
    """Added to the norm weights of a checkpoint."""
    norms_in_float32: bool = False
    """True if norm weights are kept in float32 whatever the model's type."""
    place: Place
    """Set by the model, once it has made all layers."""

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__()
        self.window = window
        self.form = AttentionForm(config.attention_scale, window, config.attention_softcap)
        self.head_dim = config.head_dim
        self._num_heads = config.num_heads
        self._ops = build.ops
        self._eps = config.rms_norm_eps
        self.input_norm = self.make_norm(config, build)
        self.qkv_proj, self.o_proj = self.make_projections(config, build)
        self.post_attention_norm = self.make_norm(config, build)
        self.mlp = self.make_mlp(config, build)

    @classmethod
    def make_projections(cls, config: ModelConfig, build: Build) -> tuple[Linear, Linear]:
        """The projections in front of attention and after it."""
        hidden = config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return (
            Linear(hidden, qkv, bias=config.qkv_bias, build=build),
            Linear(q_size, {"o_proj": hidden}, bias=config.o_bias, build=build),
        )

    @classmethod
    def make_norm(cls, config: ModelConfig, build: Build, eps: float | None = None) -> RMSNorm:
        """eps: the config's `rms_norm_eps` if not given."""
        return RMSNorm(
            config.hidden_size,
            eps=config.rms_norm_eps if eps is None else eps,
            build=build,
            offset=cls.norm_offset,
            in_float32=cls.norms_in_float32,
        )

    @classmethod
    def make_mlp(cls, config: ModelConfig, build: Build) -> GatedMLP | SparseMoe:
        return GatedMLP(config, build) if config.moe is None else SparseMoe(config, build)

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
        return self.rotate_and_store(self.qkv_proj(normed), carried, ctx, q)

    def store(self, normed: torch.Tensor, carried: Carried, ctx: ForwardContext) -> None:
        """Write k and v of these tokens to their slots, and no more."""
        self.before_attention(normed, carried, ctx)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        carried: Carried,
        ctx: ForwardContext,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`LayerOps.rotate_and_store` at this layer's place."""
        return self._ops.rotate_and_store(
            qkv,
            ctx.kv_caches[self.place.index],
            carried.rotations[self.place.rope],
            ctx.metadata[self.place.group].slot_mapping,
            num_heads=self._num_heads,
            norm_weight=self.qk_norm_weight(),
            eps=self._eps,
            q=q,
            cache_scales=self.form.cache_scales,
        )

    def qk_norm_weight(self) -> torch.Tensor | None:
        """[num_heads + num_kv_heads, head_dim] of a family that normalises q and k."""
        return None

    def attend(
        self, q: torch.Tensor, ctx: ForwardContext, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, num_heads, head_dim] from the same."""
        assert self.place.attention is not None, "a recurrent layer"
        return self.place.attention.forward(
            q,
            ctx.kv_caches[self.place.index],
            ctx.metadata[self.place.group],
            self.form,
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
        yield from self.projection_slots(prefix)
        yield self.post_attention_norm.weight_slot(f"{prefix}.post_attention_layernorm.weight")
        yield from self.mlp.weight_slots(prefix)

    def projection_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.qkv_proj.weight_slots(f"{prefix}.self_attn")
        yield from self.o_proj.weight_slots(f"{prefix}.self_attn")


class CausalDecoder(nn.Module):
    """A decoder-only language model over a paged KV cache: a `PiecewiseModel`."""

    layer_class: type[DecoderLayer] = DecoderLayer
    recurrent_class: type[DecoderLayer] = DecoderLayer
    """The class of the layers that the config calls recurrent."""

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        attention: GroupedAttention,
        recurrent: GatedDeltaNet | None = None,
    ) -> None:
        """recurrent: for a config with `linear`."""
        super().__init__()
        self.recurrent = recurrent
        self.config = config
        self.dtype = build.dtype
        self.device = build.device
        self.attention = attention
        tied = config.tie_word_embeddings
        self.embedding: VocabEmbedding | None = None
        if not tied:
            self.embedding = VocabEmbedding(
                "model.embed_tokens", config.vocab_size, config.hidden_size, build.for_tables
            )
        self._ops = build.ops
        dims = (config.kv_heads(layer)[1] for layer in range(config.num_layers))
        of_layers = list(zip(config.layer_ropes, dims, strict=True))
        self._ropes = tuple(dict.fromkeys(of_layers))
        for number, (rope, dim) in enumerate(self._ropes):
            # [rotary_dim / 2] float32
            frequencies = inverse_frequencies(rope, dim).to(self.device)
            self.register_buffer(f"inverse_frequencies_{number}", frequencies, persistent=False)
        recurrent_layers = () if config.linear is None else config.linear.layers
        layers = [
            (self.recurrent_class if index in recurrent_layers else self.layer_class)(
                config.of_layer(index), build, window=window
            )
            for index, window in enumerate(config.layer_windows)
        ]
        # Typed as what it holds, which ModuleList does not say.
        self.layers = cast(list[DecoderLayer], nn.ModuleList(layers))
        self.norm = self.make_final_norm(config, build)
        following = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            rotation = self._ropes.index(of_layers[index])
            is_last = index == len(layers) - 1
            if index in recurrent_layers:
                place = recurrent_layers.index(index)
                layer.place = Place(place, 0, rotation, None, recurrent, next_norm, is_last)
            else:
                source = config.kv_source(index)
                layer.place = Place(
                    attention.cache_of(source),
                    attention.group_of(source),
                    rotation,
                    attention.backend_of(source),
                    None,
                    next_norm,
                    is_last,
                )
        self.head = Linear(
            config.hidden_size,
            {"model.embed_tokens" if tied else "lm_head": config.vocab_size},
            bias=False,
            build=build.for_tables,
            is_looked_up=tied,
        )

    @classmethod
    def make_final_norm(cls, config: ModelConfig, build: Build) -> RMSNorm:
        return cls.layer_class.make_norm(config, build)

    def use_cache_scales(self, scales: Mapping[int, LayerScales]) -> None:
        """scales: by layer, for an fp8 cache. Layers that read another one's cache take its own."""
        for index, layer in enumerate(self.layers):
            if (own := scales.get(self.config.kv_source(index))) is not None:
                layer.form = replace(layer.form, cache_scales=own)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """input_ids [T], positions [T] -> normed hidden states [N, hidden] of `ctx.wanted`.

        The attention must have prepared `ctx.metadata`.
        """
        carried = self.begin(input_ids, positions)
        normed = self.first_input(carried)
        for number, layer in enumerate(self.layers):
            if number in ctx.kept_layers:
                ctx.kept.append(carried.residual.clone())
            normed = layer(normed, carried, ctx)
        return normed

    def begin(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Carried:
        # Rotations first: the kernels of a layer may read them before the one ahead has ended,
        # which is safe after the embedding, a launch that waits for all before it.
        rotations = tuple(
            self._ops.rotation(
                positions, getattr(self, f"inverse_frequencies_{number}"), rope.attention_factor
            )
            for number, (rope, _) in enumerate(self._ropes)
        )
        return Carried(self.embed(input_ids), rotations)

    def first_input(self, carried: Carried) -> torch.Tensor:
        """[T, hidden]: the normalised input of the first layer."""
        normed: torch.Tensor = self.layers[0].input_norm(carried.residual)
        return normed

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.embedding is None:
            return self.head.embed(input_ids)
        rows: torch.Tensor = self.embedding(input_ids)
        return rows

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] -> [N, vocab_size], in the model's type."""
        logits: torch.Tensor = self.head(hidden)
        if (cap := self.config.logit_softcap) is not None:
            logits.div_(cap / self.config.logit_factor).tanh_().mul_(cap)
        return logits

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor the model wants from a checkpoint, each exactly once."""
        if self.embedding is not None:
            yield from self.embedding.weight_slots("")
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
            if isinstance(module, Linear | ExpertList):
                module.finalize()

    # The same forward pass in pieces, for recordings (`PiecewiseModel`): skip on a first reading.

    @property
    def can_be_recorded(self) -> bool:
        """True if CUDA graphs can hold what lies between attentions."""
        return self.config.moe is None or self._ops.can_record_experts

    @property
    def can_be_cut(self) -> bool:
        """True if the pass can be taken in pieces, as the methods below do. Recurrent layers are
        recorded as a whole, or not at all."""
        return self.config.linear is None

    @property
    def num_attentions(self) -> int:
        return len(self.layers)

    def head_dim(self, index: int) -> int:
        return self.layers[index].head_dim

    def first_piece(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        *,
        q: torch.Tensor | None = None,
    ) -> tuple[Carried, torch.Tensor]:
        assert self.can_be_cut
        carried = self.begin(input_ids, positions)
        normed = self.first_input(carried)
        return carried, self.layers[0].before_attention(normed, carried, ctx, q)

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
        normed = self.layers[index].finish(attended, carried, None)
        return self.layers[index + 1].before_attention(normed, carried, ctx, q)

    def last_piece(
        self, attended: torch.Tensor, carried: Carried, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        return self.layers[-1].finish(attended, carried, wanted)
