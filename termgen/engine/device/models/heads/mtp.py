"""The MTP layer of a checkpoint: the target's own kind of layer, over a product of the embedding of
the next token and of the state behind the final norm. DeepSeek-V3 (2024), section 2.2."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.head_config import HeadConfig
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.heads.head import HeadLayer
from termgen.engine.device.models.pieces import Carried


class MtpHead(HeadLayer):
    def __init__(
        self, config: HeadConfig, target: CausalDecoder, build: Build, attention: GroupedAttention
    ) -> None:
        super().__init__(config, build, attention, target.layer_class)
        hidden = config.layers.hidden_size
        make_norm = target.layer_class.make_norm
        self.embedding_norm = make_norm(config.layers, build)
        self.state_norm = make_norm(config.layers, build)
        self.fc = Linear(2 * hidden, {"fc": hidden}, bias=False, build=build)
        # Methods, so that the target does not become a part of its head.
        self._embed, self._logits = target.embed, target.compute_logits

    def begin(self, normed: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        """See `Head`."""
        assert not kept
        return normed

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """See `Head`. Returns states behind the final norm, as the target's are."""
        normed, carried = self._mix(input_ids, positions, states)
        made: torch.Tensor = self.layer(normed, carried, ctx)
        return made

    def store(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """See `Head`."""
        normed, carried = self._mix(input_ids, positions, states)
        self.layer.store(normed, carried, ctx)

    def _mix(
        self, input_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, Carried]:
        """What the layer takes."""
        embedded = self.embedding_norm(self._embed(input_ids))
        mixed = self.fc(torch.cat((embedded, self.state_norm(states)), dim=1))
        carried = self.carry(mixed, positions)
        return self.layer.input_norm(mixed), carried

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return self._logits(states).argmax(dim=1)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.fc.weight_slots("mtp")
        yield self.embedding_norm.weight_slot("mtp.pre_fc_norm_embedding.weight")
        yield self.state_norm.weight_slot("mtp.pre_fc_norm_hidden.weight")
        yield from self.layer.weight_slots("mtp.layers.0")
        yield self.norm.weight_slot("mtp.norm.weight")
