"""Root-mean-square normalisation, computed in float32 whatever the type of its input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.layers.weight_slot import WeightSlot, empty_parameter, parameter_slot


class RMSNorm(nn.Module):
    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self._shape = (size,)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._eps)  # x [..., size]

    def weight_slot(self, name: str) -> WeightSlot:
        return parameter_slot(name, self.weight, "norm")
