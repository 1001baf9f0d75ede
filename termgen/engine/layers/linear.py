"""Linear layers, fused where the checkpoint has several matrices over one input.

A layer knows its shards (names and rows, in order); how its numbers are stored and multiplied is
its `LinearMethod`, which is where quantization plugs in. The decoder builds these, the loader
fills their slots, and `finalize` turns the filled weight into what the device multiplies fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.layers.weight_slot import WeightSlot, empty_parameter


class LinearMethod(Protocol):
    """How a linear layer's weight is stored, filled, looked up and multiplied."""

    def create(self, layer: Linear) -> None:
        """Gives the layer its (empty) parameters."""

    def load_rows(self, layer: Linear, tensor: torch.Tensor, first_row: int) -> None:
        """Stores tensor [rows, in_features] at rows [first_row, first_row + rows)."""

    def finalize(self, layer: Linear) -> None:
        """Prepares the filled weight for this device. Called once."""

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x [M, in_features] -> [M, out_features], bias included. M may be 0."""

    def embed(self, layer: Linear, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, in the layer's type: ids [T] -> [T, in_features]."""


class Linear(nn.Module):
    """One matrix product. `shards` maps the checkpoint's names to their rows, in order."""

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
        is_looked_up: bool = False,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(shards.values())
        self.dtype = dtype
        self.device = device
        self.is_looked_up = is_looked_up
        """Whether `embed` reads rows of the weight (a head tied to the input embedding)."""
        self.method = method
        self._shards = dict(shards)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter(self.out_features, dtype=dtype, device=device)
        method.create(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.method.embed(self, ids)

    def finalize(self) -> None:
        self.method.finalize(self)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """prefix: the checkpoint's path up to the shard names, such as model.layers.0.mlp."""
        first_row = 0
        for name, rows in self._shards.items():
            yield self._matrix_slot(f"{prefix}.{name}.weight", first_row, rows)
            if self.bias is not None:
                yield self._bias_slot(f"{prefix}.{name}.bias", self.bias, first_row, rows)
            first_row += rows

    def _matrix_slot(self, name: str, first_row: int, rows: int) -> WeightSlot:
        def load(tensor: torch.Tensor) -> None:
            self.method.load_rows(self, tensor, first_row)

        return WeightSlot(name, (rows, self.in_features), "matrix", load)

    def _bias_slot(self, name: str, bias: nn.Parameter, first_row: int, rows: int) -> WeightSlot:
        def load(tensor: torch.Tensor) -> None:
            bias[first_row : first_row + rows].copy_(tensor)

        return WeightSlot(name, (rows,), "bias", load)


class QKVLinear(Linear):
    """q, k and v in one product: [T, hidden] -> [T, (num_heads + 2 * num_kv_heads) * head_dim]."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
    ) -> None:
        kv_rows = num_kv_heads * head_dim
        shards = {"q_proj": num_heads * head_dim, "k_proj": kv_rows, "v_proj": kv_rows}
        super().__init__(
            hidden_size, shards, bias=bias, dtype=dtype, device=device, method=method
        )


class GateUpLinear(Linear):
    """The gate and up projections in one product: [T, hidden] -> [T, 2 * intermediate]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
    ) -> None:
        shards = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        super().__init__(
            hidden_size, shards, bias=bias, dtype=dtype, device=device, method=method
        )


class FloatLinearMethod:
    """The weight as it is. On the CPU it is kept in oneDNN's blocked layout instead, which is
    about twice as fast as the plain one at every number of rows from 1 to 256."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create(self, layer: Linear) -> None:
        layer.weight = empty_parameter(
            layer.out_features, layer.in_features, dtype=layer.dtype, device=layer.device
        )
        layer.packed = None

    def load_rows(self, layer: Linear, tensor: torch.Tensor, first_row: int) -> None:
        _weight(layer)[first_row : first_row + tensor.shape[0]].copy_(tensor)

    def finalize(self, layer: Linear) -> None:
        if not _can_pack(layer.dtype, self._device):
            return
        # Packed for no particular number of rows: that one layout was the best or within 5% of it
        # at every number of rows.
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(_weight(layer).detach(), None)
        if not layer.is_looked_up:
            layer.weight = None

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        packed = layer.packed
        if packed is None:
            return F.linear(x, _weight(layer), layer.bias)
        if x.shape[0] == 0:
            return x.new_empty(0, layer.out_features)
        y: torch.Tensor = _linear_packed(x, packed, layer.bias, "none", [], "")
        return y

    def embed(self, layer: Linear, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, _weight(layer))


_linear_packed = torch.ops.mkldnn._linear_pointwise.default
