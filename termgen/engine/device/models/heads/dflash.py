"""A DFlash head: a few layers of Qwen3's kind that guess a block of tokens at once (Chen et al.,
"DFlash: Block Diffusion for Flash Speculative Decoding", 2026).

Its context is not what it made of earlier tokens itself. Every layer takes the same vector for a
token of the context, a product of what some of the target's layers made of it, for keys and values
alone. Behind the context stands the block: the newest token, and noise in the places of those to be
guessed, which see the context and each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import nn

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.head_config import HeadConfig
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.layers.ops import Rotation, inverse_frequencies
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer, Place
from termgen.engine.device.models.pieces import Carried
from termgen.engine.device.models.qwen3 import Qwen3Layer


class DFlashHead(nn.Module):
    """Embedding and head are the target's."""

    def __init__(
        self, config: HeadConfig, target: CausalDecoder, build: Build, attention: GroupedAttention
    ) -> None:
        """attention: see `GroupedAttention.behind`."""
        super().__init__()
        self.config = config
        self.kept_layers = config.kept_layers
        self.device = build.device
        self._ops = build.ops
        own = config.layers
        self.attention = attention.only(range(own.num_layers))
        self._rope = own.layer_ropes[0]
        frequencies = inverse_frequencies(self._rope, own.head_dim).to(build.device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        into = len(config.kept_layers) * target.config.hidden_size
        self.fc = Linear(into, {"fc": own.hidden_size}, bias=False, build=build)
        self.context_norm = Qwen3Layer.make_norm(own, build)
        layers = [Qwen3Layer(own, build, window=window) for window in own.layer_windows]
        # Typed as what it holds, which ModuleList does not say.
        self.layers = cast(list[DecoderLayer], nn.ModuleList(layers))
        self.norm = Qwen3Layer.make_norm(own, build)
        following = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            layer.place = Place(
                attention.cache_of(index),
                attention.group_of(index),
                0,
                attention.backend_of(index),
                None,
                next_norm,
                is_last=index == len(layers) - 1,
            )
        # Functions, so that the target does not become a part of its head. The noise is a row of
        # the table as it is, without what a family makes of its rows.
        self._embed = partial(CausalDecoder.embed, target)
        self._logits = target.compute_logits

    def store(self, kept: list[torch.Tensor], positions: torch.Tensor, ctx: ForwardContext) -> None:
        """Write keys and values of the tokens of a context. kept: see `ForwardContext`."""
        rotations = self._rotations(positions)
        context = self._take_up(kept)
        carried = Carried(context, rotations)
        for layer in self.layers:
            layer.before_attention(context, carried, ctx)

    def forward(
        self,
        kept: list[torch.Tensor],  # each [T, hidden]
        input_ids: torch.Tensor,  # [M]: the tokens of blocks
        positions: torch.Tensor,  # [T + M] int64, those of the context first
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """[N, hidden] states of the blocks' tokens that `ctx.wanted` names. ctx: its rows are of
        blocks, its slots are those of T + M tokens."""
        rotations = self._rotations(positions)
        context = self._take_up(kept)
        carried = Carried(self._embed(input_ids), rotations)
        normed: torch.Tensor = self.layers[0].input_norm(carried.residual)
        for layer in self.layers:
            both = torch.cat((context, normed))
            q = layer.before_attention(both, carried, ctx)[len(context) :]
            normed = layer.finish(layer.attend(q, ctx), carried, ctx.wanted)
        return normed

    def _take_up(self, kept: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden]: what its layers take for the tokens of a context."""
        states: torch.Tensor = self.context_norm(self.fc(torch.cat(kept, dim=1)))
        return states

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """[N] int64 the likeliest token at the place of each."""
        return self._logits(states).argmax(dim=1)

    def _rotations(self, positions: torch.Tensor) -> tuple[Rotation, ...]:
        """They come first, as in `CausalDecoder.begin`: behind them is a launch that waits for all
        before it."""
        frequencies, factor = self.get_buffer("inverse_frequencies"), self._rope.attention_factor
        return (self._ops.rotation(positions, frequencies, factor),)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.fc.weight_slots("")
        yield self.context_norm.weight_slot("hidden_norm.weight")
        for index, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"layers.{index}")
        yield self.norm.weight_slot("norm.weight")

    def ignored_weights(self) -> tuple[str, ...]:
        return ("rotary_emb.inv_freq",)

    def repeated_weights(self) -> dict[str, str]:
        return {}

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        for module in self.modules():
            if isinstance(module, Linear | ExpertList):
                module.finalize()
