"""The decoder skeleton: embedding, layers of attention and MLP, norm, head.

Families whose difference is in their config are this class as it is; one with other arithmetic
derives from it in its own file. A layer is two halves with attention between them, so that the
halves can be recorded as graphs while attention runs eagerly. What a step needs travels as a
`ForwardContext` argument; nothing is global. The caller holds `torch.inference_mode`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from termgen.engine.attention.base import AttentionBackend, ForwardContext
from termgen.engine.layers.embedding import VocabEmbedding
from termgen.engine.layers.linear import Linear, LinearMethodFactory, QKVLinear, RowLinear
from termgen.engine.layers.mlp import GatedMLP
from termgen.engine.layers.moe import SparseMoe
from termgen.engine.layers.norm import RMSNorm
from termgen.engine.layers.ops import LayerOps
from termgen.engine.layers.rotary import Rotation, inverse_frequencies
from termgen.engine.layers.weight_slot import WeightSlot
from termgen.engine.models.config import ModelConfig


class DecoderLayer(nn.Module):
    """norm, q/k/v, rotation | attention | output projection, norm, MLP or experts."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        sliding_window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethodFactory,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.scale = config.head_dim**-0.5
        self._num_heads = config.num_heads
        self._ops = ops
        self._eps = config.rms_norm_eps
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device, ops=ops)
        self.qkv_proj = QKVLinear(
            hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
            method=method,
        )
        self.o_proj = RowLinear(
            config.num_heads * config.head_dim,
            hidden,
            name="o_proj",
            bias=config.o_bias,
            dtype=dtype,
            device=device,
            method=method,
        )
        self.post_attention_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device, ops=ops)
        mlp_class = GatedMLP if config.moe is None else SparseMoe
        self.mlp = mlp_class(config, dtype=dtype, device=device, method=method, ops=ops)

    def before_attention(
        self,
        normed: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """normed [T, hidden] -> q [T, num_heads, head_dim]; k and v go to their slots [T]."""
        return self._ops.rotate_and_store(
            self.qkv_proj(normed),
            kv_cache,
            rotation,
            slot_mapping,
            num_heads=self._num_heads,
            norm_weight=self.qk_norm_weight(),
            eps=self._eps,
        )

    def qk_norm_weight(self) -> torch.Tensor | None:
        """[num_heads + num_kv_heads, head_dim] of a family that normalises q and k."""
        return None

    def after_attention(
        self, attended: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> torch.Tensor:
        """attended [T, num_heads, head_dim] -> the next layer's normed input [T, hidden].

        Adds to `residual` [T, hidden] in place. `next_norm` is the norm that follows the layer.
        """
        normed = self.post_attention_norm.add(self.o_proj(attended.flatten(1)), residual)
        return next_norm.add(self.mlp(normed), residual)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield self.input_norm.weight_slot(f"{prefix}.input_layernorm.weight")
        yield from self.qkv_proj.weight_slots(f"{prefix}.self_attn")
        yield from self.o_proj.weight_slots(f"{prefix}.self_attn")
        yield self.post_attention_norm.weight_slot(f"{prefix}.post_attention_layernorm.weight")
        yield from self.mlp.weight_slots(prefix)


class CausalDecoder(nn.Module):
    """A decoder-only language model over a paged KV cache."""

    layer_class: type[DecoderLayer] = DecoderLayer
    inverse_frequencies: torch.Tensor  # [rotary_dim / 2] float32

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethodFactory,
        attention: AttentionBackend,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = device
        self.attention = attention
        tied = config.tie_word_embeddings
        self.embedding: VocabEmbedding | None = None
        if not tied:
            self.embedding = VocabEmbedding(
                config.vocab_size, config.hidden_size, dtype=dtype, device=device
            )
        self._ops = ops
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self.decoder_layers = [
            self.layer_class(
                config.of_layer(index),
                sliding_window=window,
                dtype=dtype,
                device=device,
                method=method,
                ops=ops,
            )
            for index, window in enumerate(config.layer_windows)
        ]
        self.layers = nn.ModuleList(self.decoder_layers)
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device, ops=ops
        )
        self.norms = [*(layer.input_norm for layer in self.decoder_layers), self.norm]
        """The norm before each layer, and the last one."""
        self.head = Linear(
            config.hidden_size,
            {"model.embed_tokens" if tied else "lm_head": config.vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            method=method,
            is_looked_up=tied,
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """input_ids [T], positions [T] -> normed hidden states [T, hidden].

        The attention backend must have prepared `ctx.metadata`.
        """
        metadata = ctx.metadata
        residual = self.embed(input_ids)
        rotation = self._ops.rotation(
            positions, self.inverse_frequencies, self.config.rope.attention_factor
        )
        normed: torch.Tensor = self.norms[0](residual)
        for index, layer in enumerate(self.decoder_layers):
            kv_cache = ctx.kv_caches[index]
            q = layer.before_attention(normed, rotation, kv_cache, metadata.slot_mapping)
            attended = self.attention.forward(
                q, kv_cache, metadata, scale=layer.scale, sliding_window=layer.sliding_window
            )
            normed = layer.after_attention(attended, residual, self.norms[index + 1])
        return normed

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
        for index, layer in enumerate(self.decoder_layers):
            yield from layer.weight_slots(f"model.layers.{index}")
        yield self.norm.weight_slot("model.norm.weight")
        yield from self.head.weight_slots("")

    def ignored_weights(self) -> tuple[str, ...]:
        """Endings of names a checkpoint may hold that the model does not want."""
        ignored = ("rotary_emb.inv_freq",)
        return (*ignored, "lm_head.weight") if self.config.tie_word_embeddings else ignored

    def finalize(self) -> None:
        """Prepares the loaded weights for the device. Called once, before the first step."""
        for module in self.modules():
            if isinstance(module, Linear | SparseMoe):
                module.finalize()
