"""Layers of a file some of whose rows are 8-bit floats and others floats of 16 bits, all kept.

A file may have 8-bit floats in most of its matrices alone, and layers here may be several of its
matrices. A layer gathers its rows until it has the last one; then neighbouring rows that are stored
alike become one part with a method of its own, so that no row is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import nn

from termgen.engine.device.kernels.gemm.small_gemm_config import Shape
from termgen.engine.device.layers.linear import LinearMethod, LinearMethodFactory, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.quantization.stored_matrices import FLOAT8_KINDS

Rows = torch.Tensor | StoredRows


class MixedFloat8Linears:
    """LinearMethodFactory: makes the layers of one model."""

    def __init__(self, in_float8: LinearMethodFactory, in_floats: LinearMethodFactory) -> None:
        self._factories = in_float8, in_floats

    def __call__(self, spec: LinearSpec) -> LinearMethod:
        return MixedFloat8Linear(spec, *self._factories)


class MixedFloat8Linear(nn.Module):
    """LinearMethod: 8 bits a number where a file has so many, else the model's type."""

    kinds = FLOAT8_KINDS

    def __init__(
        self, spec: LinearSpec, in_float8: LinearMethodFactory, in_floats: LinearMethodFactory
    ) -> None:
        super().__init__()
        self._spec = spec
        self._in_float8, self._in_floats = in_float8, in_floats
        self._loaded: list[tuple[int, Rows]] = []
        """First row, and rows."""
        self._num_missing = spec.out_features
        self.methods = nn.ModuleList()
        self._parts: list[tuple[int, int, LinearMethod]] = []
        """(first row, end, method), in order."""

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        here = StoredRows(rows.kind, rows.blocks.to(self._spec.device))
        self._add(here, first_row, len(here.blocks))

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        # A copy: the tensor may be a part of a file, or of what its caller fills anew.
        here = tensor.to(self._spec.device, self._spec.dtype, copy=True)
        self._add(here, first_row, len(here))

    def _add(self, rows: Rows, first_row: int, num_rows: int) -> None:
        self._loaded.append((first_row, rows))
        self._num_missing -= num_rows
        assert self._num_missing >= 0, "loaded twice"
        if not self._num_missing:
            self._make_parts()

    def _make_parts(self) -> None:
        self._loaded.sort(key=lambda loaded: loaded[0])
        first = 0
        for is_float, group in groupby(
            self._loaded, key=lambda loaded: isinstance(loaded[1], torch.Tensor)
        ):
            own = list(group)
            end = own[-1][0] + _count(own[-1][1])
            make = self._in_floats if is_float else self._in_float8
            method = make(replace(self._spec, out_features=end - first))
            for row, rows in own:
                if isinstance(rows, torch.Tensor):
                    method.load_rows(rows, row - first)
                else:
                    method.load_stored(rows, row - first)
            assert isinstance(method, nn.Module)
            self.methods.append(method)
            self._parts.append((first, end, method))
            first = end
        self._loaded.clear()

    def finalize(self) -> None:
        assert self._parts, "not all rows were loaded"
        for *_, method in self._parts:
            method.finalize()

    def shapes(self) -> list[Shape]:
        """Those of its parts."""
        return [shape for *_, method in self._parts for shape in method.shapes()]

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(self._parts) == 1:
            return self._parts[0][2].multiply(x, bias)
        return torch.cat(list(self._products(x, bias)), dim=1)

    def _products(self, x: torch.Tensor, bias: torch.Tensor | None) -> Iterator[torch.Tensor]:
        for first, end, method in self._parts:
            yield method.multiply(x, None if bias is None else bias[first:end])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """A row is looked up in every part: which one has it is known on the device alone."""
        found = None
        for first, end, method in self._parts:
            rows = method.embed((ids - first).clamp(0, end - first - 1))
            is_here = (ids >= first)[:, None]
            found = rows if found is None else torch.where(is_here, rows, found)
        assert found is not None, "not all rows were loaded"
        return found


def _count(rows: Rows) -> int:
    return len(rows) if isinstance(rows, torch.Tensor) else len(rows.blocks)
