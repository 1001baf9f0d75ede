"""The matrices of a layer's experts in 8-bit floats on a GPU, all in one tensor for the kernel.

Those of a file are kept with its scales, and others rounded, as `float8_rows` does with the rows of
one matrix: here they are those of all experts. Where floats of a file stay floats, one such matrix
among them makes all of the layer floats, as the kernels have one form for all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from termgen.engine.device.kernels.gemm.float8_gemm import FLOAT8
from termgen.engine.device.kernels.moe.float8_experts import Float8Weights
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import empty_parameter
from termgen.engine.device.quantization.float8_rows import Float8Rows
from termgen.engine.device.quantization.stored_matrices import (
    FLOAT8_COLUMNS,
    FLOAT8_KINDS,
    split_float8,
)


class Float8Experts(ExpertList):
    """A checkpoint fills them in any order."""

    def __init__(
        self, shape: tuple[int, int, int], build: Build, *, keeps_floats: bool = False
    ) -> None:
        """keeps_floats: floats of 16 bits are not rounded."""
        super().__init__(shape, build)
        self.keeps_floats = keeps_floats
        self._matrices = [_Matrix(self, expert) for expert in range(len(self))]
        self.rows: Float8Rows | None = None
        """Those of all matrices, one after another; None: there are none yet, or `floats`."""
        self.floats: nn.Parameter | None = None

    @property
    def _loaders(self) -> Sequence[_Matrix]:
        return self._matrices

    @property
    def transposed_kinds(self) -> frozenset[str]:
        """None: a file has scales of what are columns here."""
        return frozenset()

    def finalize(self) -> None:
        weights = self.weights
        if isinstance(weights, Float8Weights):
            weights.check()

    @property
    def weights(self) -> torch.Tensor | Float8Weights:
        if self.floats is not None:
            return self.floats
        assert self.rows is not None, "no matrix was loaded"
        num, num_rows, num_columns = self.shape
        words, scale, blocks = self.rows.words, self.rows.scale, self.rows.blocks
        return Float8Weights(
            words.view(num, num_rows, -1),
            scale.view(num, num_rows),
            None if blocks is None else blocks.view(num, -1, blocks.shape[1]),
            num_columns,
        )

    def in_float8(self) -> Float8Rows:
        if self.rows is None:
            num, num_rows, num_columns = self.shape
            self.rows = Float8Rows(num * num_rows, num_columns, self._spec.device)
            self.rows.begin_rows(num_rows)
        return self.rows

    def in_floats(self) -> nn.Parameter:
        """Room for floats, which have what was loaded before."""
        if self.floats is None:
            dtype = self._spec.dtype
            floats = empty_parameter(*self.shape, dtype=dtype, device=self._spec.device)
            if self.rows is not None:
                num_rows = self.shape[1]
                for expert, matrix in enumerate(floats):
                    first = expert * num_rows
                    matrix.copy_(self.rows.wide(slice(first, first + num_rows), dtype))
                self.rows = None
            self.floats = floats
        return self.floats


class _Matrix:
    """Loads the matrix of one expert."""

    kinds = FLOAT8_KINDS

    def __init__(self, experts: Float8Experts, expert: int) -> None:
        self._experts, self._expert = experts, expert

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        if self._experts.floats is None:
            self._experts.in_float8().load_stored(rows, self._place(first_row))
            return
        num_columns = self._experts.shape[2]
        numbers, scale = split_float8(rows, num_columns)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(FLOAT8_COLUMNS, 1)[:, :num_columns]
        self._copy(numbers.view(FLOAT8).float() * scale, first_row)

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        if self._experts.keeps_floats:
            self._copy(tensor, first_row)
        else:
            self._experts.in_float8().load_rows(tensor, self._place(first_row))

    def _place(self, row: int) -> int:
        return self._expert * self._experts.shape[1] + row

    def _copy(self, rows: torch.Tensor, first_row: int) -> None:
        self._experts.in_floats()[self._expert, first_row : first_row + len(rows)].copy_(rows)
