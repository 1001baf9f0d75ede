"""8-bit weights on the CPU: symmetric, one scale per output channel, activations in 16 bits.

A `LinearMethod`. Rows are quantized while they are loaded, so the float model never exists as a
whole. The scale is rounded to bfloat16 before it is used to quantize, so that multiplying by it
in bfloat16 adds no error of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.layers.linear import LinearSpec, can_pack
from termgen.engine.device.layers.weight_slot import empty_parameter
from termgen.errors import ConfigError

_LARGEST = 127
_MAX_PACKED_ROWS = 8
"""Up to this many activation rows torch's int8 kernel beats converting the weight first."""
_CHUNK_ELEMENTS = 2**21
"""Elements of the weight converted at a time: a chunk that stays in cache."""


class Int8Linear(nn.Module):
    """LinearMethod: weight int8 [out_features, in_features], scale bfloat16 [out_features].

    A tied embedding needs no second copy: `embed` looks rows up in the quantized head.
    """

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        if spec.device.type != "cpu":
            raise ConfigError(
                f"quantization int8 runs on the CPU only, not on {spec.device.type};"
                " leave it out or use --device cpu",
                param="quantization",
            )
        self._spec = spec
        self.weight = empty_parameter(
            spec.out_features, spec.in_features, dtype=torch.int8, device=spec.device
        )
        self.scale = empty_parameter(spec.out_features, dtype=torch.bfloat16, device=spec.device)
        # Without bfloat16 instructions a product in bfloat16 would be emulated, slowly.
        self._wide_dtype = (
            torch.bfloat16 if can_pack(torch.bfloat16, spec.device) else torch.float32
        )

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        rows = slice(first_row, first_row + tensor.shape[0])
        weight, scale = quantize_rows(tensor)
        self.weight[rows].copy_(weight)
        self.scale[rows].copy_(scale)

    def finalize(self) -> None:
        """Nothing to do: rows are quantized as they are loaded."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, self._spec.out_features)
        if num_rows <= _MAX_PACKED_ROWS:
            y = torch._weight_int8pack_mm(
                x.to(torch.bfloat16).contiguous(), self.weight, self.scale
            ).to(x.dtype)
        else:
            y = self._multiply_wide(x)
        return y if bias is None else y.add_(bias)

    def _multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self._wide_dtype)
        y = x.new_empty(x.shape[0], self._spec.out_features)
        step = max(1, _CHUNK_ELEMENTS // self._spec.in_features)
        for start in range(0, self._spec.out_features, step):
            rows = slice(start, start + step)
            product = F.linear(wide, self.weight[rows].to(self._wide_dtype))
            torch.mul(product, self.scale[rows], out=y[:, rows])
        return y

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        weight = self.weight.index_select(0, ids).to(self._spec.dtype)
        return weight.mul_(self.scale.index_select(0, ids)[:, None])


def quantize_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """tensor [rows, n] -> (int8 [rows, n], bfloat16 scale [rows]), nearest, symmetric."""
    tensor = tensor.float()
    scale = (tensor.abs().amax(1) / _LARGEST).to(torch.bfloat16)
    # A row of zeros, or one too small for a scale, is stored as zeros.
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).float()
    weight = (tensor / divisor[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
    return weight.to(torch.int8), scale
