"""Root-mean-square normalisation, computed in float32 whatever the type of its input.

A weight may be kept in float32 beside a model of a half type. Then the normalised value is rounded
once, after the product with the weight; else before it too, as the families define it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
        in_float32: bool = False,
    ) -> None:
        """offset: what is added to the checkpoint's weight. in_float32: keep the weight so, as an
        offset does."""
        super().__init__()
        self.weight = _weight(build, in_float32 or offset != 0.0, size)
        self._eps = eps
        self._ops = build.ops
        self._offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)  # [T, size]

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x [T, size] to the residual, in place, and returns what that is normalised."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

    def norm_add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        following: RMSNorm,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Adds x [T, size], normalised, to the residual and scales that, in place, and returns what
        the `following` norm makes of it."""
        return self._ops.norm_add_norm(
            x, residual, self.weight, following.weight, self._eps, following._eps, scale
        )

    def weight_slot(self, name: str) -> WeightSlot:
        return _slot(name, (len(self.weight),), self.weight, self._offset)


class HeadNorm(nn.Module):
    """The weights of an RMS norm over each head: one for the heads of q and one for those of k.

    Kept spread over all heads [num_qk_heads, head_dim], so that q and k are normalised together,
    and those of v with them in a family that does so without a weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        offset: float = 0.0,
        *,
        in_float32: bool = False,
        has_values: bool = False,
    ) -> None:
        """has_values: True if heads of v are normalised, too. The rest as for `RMSNorm`."""
        super().__init__()
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        num_heads = config.num_heads + config.num_kv_heads * (2 if has_values else 1)
        self.weight = _weight(build, in_float32 or offset != 0.0, num_heads, config.head_dim)
        self._shape = (config.head_dim,)
        self._offset = offset

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        q, k = self.weight[:num_heads], self.weight[num_heads:][:num_kv_heads]
        of_q = _slot(f"{prefix}.q_norm.weight", self._shape, q, self._offset)

        def load(tensor: torch.Tensor) -> None:
            of_q.load(tensor)
            self.weight[num_heads + num_kv_heads :].fill_(1.0)

        yield replace(of_q, load=load)
        if num_kv_heads:
            yield _slot(f"{prefix}.k_norm.weight", self._shape, k, self._offset)


def _weight(build: Build, in_float32: bool, *shape: int) -> nn.Parameter:
    # A weight near zero has digits that its sum with an offset keeps in float32 alone.
    dtype = torch.float32 if in_float32 else build.dtype
    return empty_parameter(*shape, dtype=dtype, device=build.device)


def _slot(name: str, shape: tuple[int, ...], weight: torch.Tensor, offset: float) -> WeightSlot:
    """A slot that fills every row of `weight`, [..., shape]."""

    def load(tensor: torch.Tensor) -> None:
        weight.copy_(tensor.expand_as(weight))
        if offset:
            weight.add_(offset)

    return WeightSlot(name, shape, "norm", load, offset=offset)
