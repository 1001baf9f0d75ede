"""Gemma 4's assistant: a small Gemma 4 that has queries alone, and looks with them at the keys and
values of its target.

Its input is a product of the embedding of the newest token beside a state, both the target's; for
further drafts the state is a product of its own. It may have sorted the vocabulary into clusters,
each with a centroid: then it looks for the likeliest token in the likeliest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.head_config import HeadConfig
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.ops import inverse_frequencies
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import CausalDecoder, Place
from termgen.engine.device.models.gemma4 import Gemma4Layer
from termgen.engine.device.models.pieces import Carried

UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")


class AssistantHead(nn.Module):
    kept_layers: tuple[int, ...] = ()

    def __init__(
        self,
        config: HeadConfig,
        target: CausalDecoder,
        build: Build,
        attention: GroupedAttention,
    ) -> None:
        """attention: its own, over the target's groups (`reading_attention`)."""
        super().__init__()
        self.config = config
        self.device = build.device
        self.attention = attention
        self._ops = build.ops
        own, num_layers = config.layers, target.config.num_layers
        backbone = target.config.hidden_size
        self.pre_projection = Linear(
            2 * backbone, {"pre_projection": own.hidden_size}, bias=False, build=build
        )
        self.post_projection = Linear(
            own.hidden_size, {"post_projection": backbone}, bias=False, build=build
        )
        dims = [own.kv_heads(layer)[1] for layer in range(own.num_layers)]
        of_layers = list(zip(own.layer_ropes, dims, strict=True))
        self._ropes = tuple(dict.fromkeys(of_layers))
        for number, (rope, dim) in enumerate(self._ropes):
            frequencies = inverse_frequencies(rope, dim).to(self.device)
            self.register_buffer(f"inverse_frequencies_{number}", frequencies, persistent=False)
        layers = [
            Gemma4Layer(own.of_layer(index), build, window=window)
            for index, window in enumerate(own.layer_windows)
        ]
        # Typed as what it holds, which ModuleList does not say.
        self.layers = cast(list[Gemma4Layer], nn.ModuleList(layers))
        self.norm = Gemma4Layer.make_norm(own, build)
        following = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            source = own.kv_source(index) + num_layers
            scales = target.layers[source].form.cache_scales
            layer.form = replace(layer.form, cache_scales=scales)
            layer.place = Place(
                attention.cache_of(source),
                attention.group_of(source),
                self._ropes.index(of_layers[index]),
                attention.backend_of(source),
                None,
                next_norm,
                is_last=index == len(layers) - 1,
            )
        self.is_tied = own.tie_word_embeddings
        number, size = config.num_centroids, own.vocab_size
        self.head = Linear(
            own.hidden_size,
            {"model.embed_tokens" if self.is_tied else "lm_head": size},
            bias=False,
            build=build.for_tables,
            is_looked_up=number > 0,
        )
        self.centroids: Linear | None = None
        if number:
            rows = {"centroids": number}
            self.centroids = Linear(own.hidden_size, rows, bias=False, build=build.for_tables)
        self.clusters = torch.zeros(
            (number, size // max(1, number)), dtype=torch.int64, device=build.device
        )
        """[num_centroids, tokens of each]"""
        self.cluster_of = torch.zeros(self.clusters.numel(), dtype=torch.int64, device=build.device)
        # A method, so that the target does not become a part of its head.
        self._embed = target.embed

    def forward(
        self,
        input_ids: torch.Tensor,  # [B]
        positions: torch.Tensor,  # [B] int64
        states: torch.Tensor,  # [B, hidden of the target]
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """[B, hidden] states behind the final norm."""
        # Rotations first: see `CausalDecoder.begin`.
        rotations = tuple(
            self._ops.rotation(
                positions, self.get_buffer(f"inverse_frequencies_{number}"), rope.attention_factor
            )
            for number, (rope, _) in enumerate(self._ropes)
        )
        both = torch.cat((self._embed(input_ids), states), dim=1)
        carried = Carried(self.pre_projection(both), rotations)
        normed: torch.Tensor = self.layers[0].input_norm(carried.residual)
        for layer in self.layers:
            normed = layer(normed, carried, ctx)
        return normed

    def next_states(self, states: torch.Tensor) -> torch.Tensor:
        """[B, hidden of the target]: what a further draft begins with."""
        made: torch.Tensor = self.post_projection(states)
        return made

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """[B] int64 the likeliest next token of each."""
        if self.centroids is None:
            best: torch.Tensor = self.head(states).argmax(dim=1)
            return best
        active = self.config.num_active_centroids
        chosen = self.centroids(states).topk(active, dim=1).indices  # [B, active]
        if chosen.numel() * self.clusters.shape[1] > self.clusters.numel():
            # More rows of the head than it has: all of them are fewer.
            is_active = torch.zeros(
                (len(states), len(self.clusters)), dtype=torch.bool, device=states.device
            ).scatter_(1, chosen, True)
            scores = self.head(states).masked_fill_(~is_active[:, self.cluster_of], -torch.inf)
            best = scores.argmax(dim=1)
            return best
        ids = self.clusters[chosen].flatten(1)  # [B, tokens of these clusters]
        rows = self.head.embed(ids.flatten()).view(*ids.shape, -1)
        scores = torch.bmm(rows, states[:, :, None]).squeeze(2)
        return ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)

    def use_clusters(self, clusters: torch.Tensor) -> None:
        """clusters: [num_centroids, tokens of each] int64, with each token once."""
        self.clusters.copy_(clusters)
        numbers = torch.arange(len(clusters), device=self.device).repeat_interleave(
            clusters.shape[1]
        )
        self.cluster_of[self.clusters.flatten()] = numbers

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.pre_projection.weight_slots("")
        yield from self.post_projection.weight_slots("")
        for index, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{index}")
        yield self.norm.weight_slot("model.norm.weight")
        yield from self.head.weight_slots("")
        if self.centroids is not None:
            yield from self.centroids.weight_slots("masked_embedding")

    def ignored_weights(self) -> tuple[str, ...]:
        unused = (
            f"model.layers.{layer}.self_attn.{name}.weight"
            for layer in range(len(self.layers))
            for name in UNUSED
        )
        table = "lm_head.weight" if self.is_tied else "model.embed_tokens.weight"
        return ("rotary_emb.inv_freq", table, *unused)

    def repeated_weights(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.is_tied else {}

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize()
        for layer in self.layers:
            layer.scale = layer.layer_scalar.item()
