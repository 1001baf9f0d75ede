"""Linear layers, fused where the checkpoint has several matrices over one input.

A layer knows its shards (names and rows, in order); how its numbers are stored and multiplied is
its `LinearMethod`, which is where quantization plugs in. The decoder builds these, the loader
fills their slots, and `finalize` turns the filled weight into what the device multiplies fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.kernels.gemm.small_gemm_config import Shape
from termgen.engine.device.layers.ops import LayerOps
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot, empty_parameter


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A weight [out_features, in_features] to be stored, for activations of `dtype`."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    device: torch.device
    is_looked_up: bool
    """True if `embed` reads rows of the weight (a head tied to the input embedding)."""
    is_multiplied: bool = True
    """False for a table, of which rows are looked up alone."""


class LinearMethod(Protocol):
    """Storage of one layer's weight: filling, multiplication and lookup."""

    kinds: frozenset[str]
    """Kinds of stored blocks that `load_stored` keeps."""

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        """The same as `load_rows` of the rows' values, which it does not round."""

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        """Stores tensor [rows, in_features] at rows [first_row, first_row + rows)."""

    def finalize(self) -> None:
        """Prepares the filled weight for this device. Called once, after loading."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, in_features] -> [M, out_features], in x's type. M may be 0."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight in the model's type: ids [T] -> [T, in_features]."""

    def shapes(self) -> list[Shape]:
        """The weights that a product reads, one for each kernel, as `termgen tune` measures them;
        none where there is no choice of kernels. After loading."""


LinearMethodFactory = Callable[[LinearSpec], LinearMethod]
MakeExperts = Callable[[tuple[int, int, int], "Build"], nn.Module]


@dataclass(frozen=True, slots=True)
class Build:
    """The choices that all layers of a model share."""

    dtype: torch.dtype
    device: torch.device
    method: LinearMethodFactory
    """Factory for the storage and multiplication of matrices."""
    ops: LayerOps
    make_experts: MakeExperts | None = None
    """An `ExpertList` for the matrices [num_experts, rows, columns] of a layer's experts; None: one
    tensor of floats."""
    router_method: LinearMethodFactory | None = None
    """The factory for the matrices of routers; None: `method`."""
    table_method: LinearMethodFactory | None = None
    """The same for heads and tables of embeddings; None: `method`."""

    @property
    def for_tables(self) -> Build:
        return replace(self, method=self.table_method or self.method)

    @property
    def for_routers(self) -> Build:
        return replace(self, method=self.router_method or self.method)

    def parameter(self, *shape: int) -> nn.Parameter:
        return empty_parameter(*shape, dtype=self.dtype, device=self.device)


class Linear(nn.Module):
    """One matrix product. `shards` maps the checkpoint's names to their rows, in order."""

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        *,
        bias: bool,
        build: Build,
        is_looked_up: bool = False,
        is_multiplied: bool = True,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(shards.values())
        self._shards = dict(shards)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = build.parameter(self.out_features)
        self.method = build.method(
            LinearSpec(
                in_features,
                self.out_features,
                build.dtype,
                build.device,
                is_looked_up,
                is_multiplied,
            )
        )
        self._multiply = self.method.multiply  # looking a module's part up takes a microsecond
        self._multiply_gated = getattr(self.method, "multiply_gated", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.bias)

    def gated(self, x: torch.Tensor, activation: str, ops: LayerOps) -> torch.Tensor:
        """act(gate) * up of the product, whose rows are those of gate and then those of up: in one
        launch where the method has `multiply_gated` and that takes this many rows of x."""
        if self._multiply_gated is not None:
            y: torch.Tensor | None = self._multiply_gated(x, self.bias, activation)
            if y is not None:
                return y
        return ops.gated_activation(self._multiply(x, self.bias), activation)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.method.embed(ids)

    def finalize(self) -> None:
        self.method.finalize()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """prefix: the checkpoint's path up to the shard names, such as model.layers.0.mlp."""
        first_row = 0
        for shard, rows in self._shards.items():
            name = f"{prefix}.{shard}" if prefix else shard
            yield self._matrix_slot(f"{name}.weight", first_row, rows)
            if self.bias is not None:
                part = self.bias[first_row : first_row + rows]
                yield WeightSlot(f"{name}.bias", (rows,), "bias", _copier(part))
            first_row += rows

    def _matrix_slot(self, name: str, first_row: int, rows: int) -> WeightSlot:
        def load(tensor: torch.Tensor, first: int = 0) -> None:
            self.method.load_rows(tensor, first_row + first)

        def load_stored(stored: StoredRows, first: int) -> None:
            self.method.load_stored(stored, first_row + first)

        shape = (rows, self.in_features)
        kinds = self.method.kinds
        return WeightSlot(name, shape, "matrix", load, load, kinds, load_stored)


def _copier(part: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def load(tensor: torch.Tensor) -> None:
        part.copy_(tensor)

    return load


class FloatLinear(nn.Module):
    """LinearMethod: the unquantized weight in the model's type.

    On the CPU it is multiplied in oneDNN's blocked layout, about twice as fast as the plain one at
    every number of rows from 1 to 256. The plain copy is dropped unless rows of it are looked up.
    """

    kinds: frozenset[str] = frozenset()

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self._spec = spec
        self.weight: nn.Parameter | None = empty_parameter(
            spec.out_features, spec.in_features, dtype=spec.dtype, device=spec.device
        )
        self._packed: torch.Tensor | None = None

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        raise AssertionError(f"{rows.kind} is not among the kinds that this keeps")

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        assert self.weight is not None, "loading into a finalized layer"
        self.weight[first_row : first_row + tensor.shape[0]].copy_(tensor)

    def finalize(self) -> None:
        spec = self._spec
        if self.weight is None or not spec.is_multiplied or not can_pack(spec.dtype, spec.device):
            return
        # Packed for no particular number of rows: of the layouts tried (for 1, 8, 32, 128, 256 and
        # none) that one was the fastest, or within noise of it, from 1 row to 256.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        # Lookups read rows of the plain form. A tied head keeps both: the packed one multiplies 8
        # rows in half the time.
        if not self._spec.is_looked_up:
            self.weight = None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, bias)
        if x.shape[0] == 0:
            return x.new_empty(0, self._spec.out_features)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, bias, "none", [], ""
        )
        return y

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None, "the spec did not say that rows are looked up"
        return F.embedding(ids, self.weight)

    def shapes(self) -> list[Shape]:
        return [Shape(self._spec.out_features, self._spec.in_features)]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True if oneDNN multiplies this type on this machine without emulating it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.float32:
        return True
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class VocabEmbedding(Linear):
    """A table of its own, kept as other matrices are. A tied model has none and looks rows up in
    its head."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, build: Build) -> None:
        """name: the table's in a checkpoint."""
        super().__init__(
            hidden_size,
            {name: vocab_size},
            bias=False,
            build=build,
            is_looked_up=True,
            is_multiplied=False,
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)  # [T] -> [T, hidden]
