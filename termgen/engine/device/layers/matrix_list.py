"""Matrices of a layer's experts, each with a `LinearMethod` of its own.

Where no kernel computes all experts of a layer at once: one expert after another is multiplied, as
other matrices of the model are.
"""

from __future__ import annotations

import torch
from torch import nn

from termgen.engine.device.layers.linear import Build, LinearMethod, LinearMethodFactory, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot


class MatrixList(nn.Module):
    """Matrices [num_rows, num_columns], in the place of one tensor [num, num_rows, num_columns]."""

    def __init__(
        self, shape: tuple[int, int, int], build: Build, make_method: LinearMethodFactory
    ) -> None:
        super().__init__()
        self.shape = shape
        num, num_rows, num_columns = shape
        spec = LinearSpec(num_columns, num_rows, build.dtype, build.device, is_looked_up=False)
        self._methods: list[LinearMethod] = [make_method(spec) for _ in range(num)]
        # Their weights count as the model's.
        self.experts = nn.ModuleList(m for m in self._methods if isinstance(m, nn.Module))

    def __len__(self) -> int:
        return len(self._methods)

    def product(self, expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, num_columns] -> [M, num_rows]"""
        return self._methods[expert].multiply(x, bias)

    def __setitem__(self, expert: int, matrix: torch.Tensor) -> None:
        """Store the whole matrix of an expert, as numbers."""
        self._methods[expert].load_rows(matrix, 0)

    def finalize(self) -> None:
        for method in self._methods:
            method.finalize()

    def rows_slot(self, name: str, expert: int, first_row: int, num_rows: int) -> WeightSlot:
        """Rows of one expert's matrix."""
        method = self._methods[expert]

        def load(tensor: torch.Tensor, first: int = 0) -> None:
            method.load_rows(tensor, first_row + first)

        def load_stored(rows: StoredRows, first: int) -> None:
            method.load_stored(rows, first_row + first)

        shape = (num_rows, self.shape[2])
        return WeightSlot(name, shape, "matrix", load, load, method.kinds, load_stored)

    def stack_slot(self, name: str, num: int, *pieces: WeightSlot) -> WeightSlot:
        """The first `num` matrices, one after another. Stored rows are counted through all."""
        _, num_rows, num_columns = self.shape

        def load(tensor: torch.Tensor, first: int = 0) -> None:
            for expert, matrix in enumerate(tensor, first):
                self[expert] = matrix

        def load_stored(rows: StoredRows, first: int) -> None:
            at = 0
            while at < len(rows.blocks):
                expert, first_row = divmod(first + at, num_rows)
                end = at + num_rows - first_row
                part = StoredRows(rows.kind, rows.blocks[at:end])
                self._methods[expert].load_stored(part, first_row)
                at = end

        kinds = self._methods[0].kinds
        shape = (num, num_rows, num_columns)
        return WeightSlot(name, shape, "matrix", load, load, kinds, load_stored, pieces=pieces)
