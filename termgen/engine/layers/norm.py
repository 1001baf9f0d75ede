"""Root-mean-square normalisation, computed in float32 whatever the type of its input."""

from __future__ import annotations

import torch
from torch import nn

from termgen.engine.layers.ops import LayerOps
from termgen.engine.layers.weight_slot import WeightSlot, empty_parameter, parameter_slot


class RMSNorm(nn.Module):
    def __init__(
        self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device, ops: LayerOps
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self._eps = eps
        self._ops = ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)  # [T, size]

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x [T, size] to the residual, in place, and returns what that is normalised."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

    def weight_slot(self, name: str) -> WeightSlot:
        return parameter_slot(name, self.weight, "norm")
