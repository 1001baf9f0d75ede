"""The input embedding: a table of its own, or rows of the head it is tied to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.layers.weight_slot import WeightSlot, empty_parameter, parameter_slot


class VocabEmbedding(nn.Module):
    """A table of its own. A tied model has none and looks rows up in its head (`Linear.embed`)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)  # [T] -> [T, hidden]

    def weight_slot(self, name: str) -> WeightSlot:
        return parameter_slot(name, self.weight, "matrix")
