"""Root-mean-square normalisation, computed in float32 whatever the type of its input.

A weight may be kept in float32 beside a model of a half type. Then the normalised value is rounded
once, after the product with the weight; else before it too, as the families define it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.weight_slot import WeightSlot, empty_parameter


class RMSNorm(nn.Module):
    def __init__(
        self,
        size: int,
        *,
        eps: float,
        build: Build,
        offset: float = 0.0,
    ) -> None:
        """offset: what is added to the checkpoint's weight."""
        super().__init__()
        self.weight = _weight(build, offset, size)
        self._eps = eps
        self._ops = build.ops
        self._offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)  # [T, size]

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x [T, size] to the residual, in place, and returns what that is normalised."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

    def norm_add(self, x: torch.Tensor, residual: torch.Tensor, following: RMSNorm) -> torch.Tensor:
        """Adds x [T, size], normalised, to the residual, in place, and returns what the `following`
        norm makes of that."""
        return self._ops.norm_add_norm(x, residual, self.weight, following.weight, self._eps)

    def weight_slot(self, name: str) -> WeightSlot:
        return _slot(name, (len(self.weight),), self.weight, self._offset)


class HeadNorm(nn.Module):
    """The weights of an RMS norm over each head: one for the heads of q and one for those of k.

    Kept spread over all heads [num_qk_heads, head_dim], so that q and k are normalised together.
    """

    def __init__(self, config: ModelConfig, build: Build, offset: float = 0.0) -> None:
        super().__init__()
        self._num_heads = config.num_heads
        num_qk_heads = config.num_heads + config.num_kv_heads
        self.weight = _weight(build, offset, num_qk_heads, config.head_dim)
        self._shape = (config.head_dim,)
        self._offset = offset

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        q, k = self.weight[: self._num_heads], self.weight[self._num_heads :]
        yield _slot(f"{prefix}.q_norm.weight", self._shape, q, self._offset)
        yield _slot(f"{prefix}.k_norm.weight", self._shape, k, self._offset)


def _weight(build: Build, offset: float, *shape: int) -> nn.Parameter:
    # A weight near zero has digits that its sum with an offset keeps in float32 alone.
    dtype = torch.float32 if offset else build.dtype
    return empty_parameter(*shape, dtype=dtype, device=build.device)


def _slot(name: str, shape: tuple[int, ...], weight: torch.Tensor, offset: float) -> WeightSlot:
    """A slot that fills every row of `weight`, [..., shape]."""

    def load(tensor: torch.Tensor) -> None:
        weight.copy_(tensor.expand_as(weight))
        if offset:
            weight.add_(offset)

    return WeightSlot(name, shape, "norm", load, offset=offset)
