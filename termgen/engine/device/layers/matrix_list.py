"""Matrices of a layer's experts that are not stored as one tensor of floats.

ExpertList   the half that a checkpoint fills, expert by expert
MatrixList   each with a `LinearMethod` of its own, where no kernel computes all experts of a
             layer at once: one after another is multiplied, as other matrices of the model are
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from termgen.engine.device.layers.linear import Build, LinearMethod, LinearMethodFactory, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot


class MatrixLoader(Protocol):
    """The half of a `LinearMethod` that fills a matrix."""

    kinds: frozenset[str]

    def load_stored(self, rows: StoredRows, first_row: int) -> None: ...

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None: ...


class ExpertList(nn.Module):
    """Matrices [num_rows, num_columns], in the place of one tensor [num, num_rows, num_columns]."""

    def __init__(self, shape: tuple[int, int, int], build: Build) -> None:
        super().__init__()
        self.shape = shape
        _, num_rows, num_columns = shape
        self._spec = LinearSpec(
            num_columns, num_rows, build.dtype, build.device, is_looked_up=False
        )

    @property
    def form(self) -> object:
        """What kernels know of the matrices beside the types and shapes of tensors."""
        return None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    @abstractmethod
    def _loaders(self) -> Sequence[MatrixLoader]:
        """One of each matrix."""

    @abstractmethod
    def finalize(self) -> None:
        """Prepare the filled matrices. Called once, after loading."""

    def __setitem__(self, expert: int, matrix: torch.Tensor) -> None:
        """Store the whole matrix of an expert, as numbers."""
        self._loaders[expert].load_rows(matrix, 0)

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of stored blocks that `load_stored` keeps."""
        return self._loaders[0].kinds

    @property
    def transposed_kinds(self) -> frozenset[str]:
        """Those that come as rows [out, in] from a file that has numbers as [in, out]."""
        return self.kinds

    def load_stored(self, expert: int, rows: StoredRows, first_row: int = 0) -> None:
        """Store rows of an expert's matrix as a file has them."""
        self._loaders[expert].load_stored(rows, first_row)

    def rows_slot(self, name: str, expert: int, first_row: int, num_rows: int) -> WeightSlot:
        """Rows of one expert's matrix."""
        loader = self._loaders[expert]

        def load(tensor: torch.Tensor, first: int = 0) -> None:
            loader.load_rows(tensor, first_row + first)

        def load_stored(rows: StoredRows, first: int) -> None:
            loader.load_stored(rows, first_row + first)

        shape = (num_rows, self.shape[2])
        return WeightSlot(name, shape, "matrix", load, load, loader.kinds, load_stored)

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
                self.load_stored(expert, StoredRows(rows.kind, rows.blocks[at:end]), first_row)
                at = end

        shape = (num, num_rows, num_columns)
        return WeightSlot(
            *(name, shape, "matrix", load, load, self.kinds, load_stored), pieces=pieces
        )


class MatrixList(ExpertList):
    def __init__(
        self, shape: tuple[int, int, int], build: Build, make_method: LinearMethodFactory
    ) -> None:
        super().__init__(shape, build)
        self._methods: list[LinearMethod] = [make_method(self._spec) for _ in range(shape[0])]
        # Their weights count as the model's.
        self.experts = nn.ModuleList(m for m in self._methods if isinstance(m, nn.Module))

    @property
    def _loaders(self) -> Sequence[LinearMethod]:
        return self._methods

    def finalize(self) -> None:
        for method in self._methods:
            method.finalize()

    def product(self, expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, num_columns] -> [M, num_rows]"""
        return self._methods[expert].multiply(x, bias)
