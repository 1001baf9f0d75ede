"""An EAGLE-3 head: a Llama's layer over the embedding of the next token beside a state, which is a
product of the inputs of three layers of the target (Li et al., "EAGLE-3", 2025).

Its further drafts take up its own residual stream, ahead of the norm. It may guess some tokens of
the vocabulary alone, each of which is named by how far it lies behind its own number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.head_config import NUM_KEPT, HeadConfig
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build, Linear, VocabEmbedding
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer
from termgen.engine.device.models.heads.head import HeadLayer
from termgen.engine.device.models.pieces import Carried
from termgen.vocabulary.cache_groups import Window


class Eagle3Layer(DecoderLayer):
    """Its attention takes two vectors in: the normalised embedding, and the normalised state."""

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self.state_norm = self.make_norm(config, build)

    @classmethod
    def make_projections(cls, config: ModelConfig, build: Build) -> tuple[Linear, Linear]:
        hidden = config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return (
            Linear(2 * hidden, qkv, bias=config.qkv_bias, build=build),
            Linear(q_size, {"o_proj": hidden}, bias=config.o_bias, build=build),
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield self.state_norm.weight_slot(f"{prefix}.hidden_norm.weight")


class Eagle3Head(HeadLayer):
    def __init__(
        self,
        config: HeadConfig,
        target: CausalDecoder,
        build: Build,
        attention: GroupedAttention,
        *,
        has_embedding: bool,
        has_head: bool,
    ) -> None:
        """has_embedding, has_head: True if its files have their own; False: the target's are
        shared."""
        super().__init__(config, build, attention, Eagle3Layer)
        own = config.layers
        into = NUM_KEPT * target.config.hidden_size
        self.fc = Linear(into, {"fc": own.hidden_size}, bias=False, build=build)
        self.embedding: VocabEmbedding | None = None
        if has_embedding:
            self.embedding = VocabEmbedding(
                "embed_tokens", own.vocab_size, own.hidden_size, build.for_tables
            )
        self.head: Linear | None = None
        if has_head:
            rows = {"lm_head": config.draft_vocab_size}
            self.head = Linear(own.hidden_size, rows, bias=False, build=build.for_tables)
        self.token_ids = torch.arange(config.draft_vocab_size, device=build.device)
        """[draft_vocab_size] int64: the target's number of each token that it can guess."""
        # Methods, so that the target does not become a part of its head.
        self._embed, self._logits = target.embed, target.compute_logits

    def begin(self, normed: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        """See `Head`."""
        states: torch.Tensor = self.fc(torch.cat(kept, dim=1))
        return states

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """See `Head`. Returns its residual stream."""
        layer, (both, carried) = self.layer, self._mix(input_ids, positions, states)
        assert isinstance(layer, Eagle3Layer)
        residual = carried.residual
        attended = layer.attend(layer.before_attention(both, carried, ctx), ctx)
        if ctx.wanted is not None:
            attended, residual = attended[ctx.wanted], residual[ctx.wanted]
        layer.after_attention(attended, residual)
        return residual

    def store(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """See `Head`."""
        both, carried = self._mix(input_ids, positions, states)
        self.layer.store(both, carried, ctx)

    def _mix(
        self, input_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, Carried]:
        """What the layer takes."""
        layer = self.layer
        assert isinstance(layer, Eagle3Layer)
        embed = self._embed if self.embedding is None else self.embedding
        taken = layer.state_norm(states)
        both = torch.cat((layer.input_norm(embed(input_ids)), taken), dim=1)
        residual = (taken if self.config.norms_residual else states).clone()
        return both, self.carry(residual, positions)

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        head = self._logits if self.head is None else self.head
        guessed: torch.Tensor = head(self.norm(states)).argmax(dim=1)
        return self.token_ids[guessed]

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.fc.weight_slots("")
        if self.embedding is not None:
            yield from self.embedding.weight_slots("")
        yield from self.layer.weight_slots("layers.0")
        yield self.norm.weight_slot("norm.weight")
        if self.head is not None:
            yield from self.head.weight_slots("")
