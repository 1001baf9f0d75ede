"""What heads have in common: one layer at a place behind those of the target."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.head_config import HeadConfig
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.layers.ops import inverse_frequencies
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.decoder import DecoderLayer, Place
from termgen.engine.device.models.pieces import Carried


class HeadLayer(nn.Module):
    """A layer, its rotation, and the norm behind it."""

    def __init__(
        self,
        config: HeadConfig,
        build: Build,
        attention: GroupedAttention,
        layer_class: type[DecoderLayer],
    ) -> None:
        """attention: see `GroupedAttention.behind`."""
        super().__init__()
        self.config = config
        self.kept_layers = config.kept_layers
        self.device = build.device
        self._ops = build.ops
        own = config.layers
        self._rope = own.layer_ropes[0]
        frequencies = inverse_frequencies(self._rope, own.head_dim).to(build.device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self.layer = layer_class(own.of_layer(0), build, window=None)
        self.norm = layer_class.make_norm(own, build)
        self.layer.place = Place(
            attention.cache_of(0),
            attention.group_of(0),
            0,
            attention.backend_of(0),
            None,
            self.norm,
            is_last=True,
        )

    def carry(self, residual: torch.Tensor, positions: torch.Tensor) -> Carried:
        """The state of a pass whose residual stream this is, which it adds to."""
        frequencies, factor = self.get_buffer("inverse_frequencies"), self._rope.attention_factor
        return Carried(residual, (self._ops.rotation(positions, frequencies, factor),))

    def weight_slots(self) -> Iterator[WeightSlot]:
        raise NotImplementedError  # abstract: each kind names its own

    def ignored_weights(self) -> tuple[str, ...]:
        return ("rotary_emb.inv_freq",)

    def repeated_weights(self) -> dict[str, str]:
        return {}

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        for module in self.modules():
            if isinstance(module, Linear | ExpertList):
                module.finalize()
