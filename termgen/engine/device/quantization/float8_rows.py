"""Rows of 8-bit floats on a GPU, of one matrix or of several, as `float8_gemm` has them.

They are kept as a file has them, with its scales, or rounded while they are loaded. A row of a
matrix has one scale: of rounded ones a power of two, so that what is stored times its scale is
exact in 16 bits, too. Scales of blocks come in a table beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.kernels.gemm.float8_gemm import (
    BLOCK_ROWS,
    FLOAT8,
    GROUP,
    RUN,
    pack,
    widen,
)
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import empty_parameter
from termgen.engine.device.quantization.stored_matrices import (
    FLOAT8_BLOCKS,
    FLOAT8_KINDS,
    split_float8,
)

_LARGEST = torch.finfo(FLOAT8).max
_PART_NUMBERS = 2**26
"""Numbers that are rounded at a time."""


class Float8Rows(nn.Module):
    """8 bits a number, 32 bits a row, and 32 for each block of a file."""

    kinds = FLOAT8_KINDS

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        super().__init__()
        self._size = num_rows, num_columns
        self._padding = -num_columns % GROUP
        num_words = (num_columns + self._padding) // 4
        self.words = empty_parameter(num_rows, num_words, dtype=torch.int32, device=device)
        self.scale = empty_parameter(num_rows, dtype=torch.float32, device=device)
        self.blocks: nn.Parameter | None = None
        """Scales of blocks; ones for rows that have none."""
        self._block_rows = BLOCK_ROWS

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        numbers, scale = split_float8(rows, self._size[1])
        here = slice(first_row, first_row + len(numbers))
        padded = F.pad(numbers.to(self.words.device), (0, self._padding))
        self.words[here].copy_(pack(padded.view(FLOAT8)))
        self.begin_rows(first_row)
        if rows.kind == FLOAT8_BLOCKS:
            # Rows that a family has in another order may share none.
            own = scale[:: self._block_rows].repeat_interleave(self._block_rows, 0)
            if not torch.equal(own[: len(scale)], scale):
                self.begin_rows(1)
            self.scale[here] = 1.0
            self._keep_blocks(scale, first_row)
        else:
            self.scale[here].copy_(scale[:, 0])

    def begin_rows(self, first_row: int) -> None:
        """Give each row scales of its own where a matrix begins among rows that share them."""
        if first_row % self._block_rows == 0:
            return
        if self.blocks is not None:
            wide = self.blocks.repeat_interleave(self._block_rows, 0)[: self._size[0]]
            self.blocks = nn.Parameter(wide.contiguous(), requires_grad=False)
        self._block_rows = 1

    def _keep_blocks(self, scale: torch.Tensor, first_row: int) -> None:
        """scale: [rows, blocks of 128 columns]"""
        step = self._block_rows
        if self.blocks is None:
            size = (-(-self._size[0] // step), 2 * self.words.shape[1] // RUN.value)
            ones = torch.ones(size, dtype=torch.float32, device=self.words.device)
            self.blocks = nn.Parameter(ones, requires_grad=False)
        own = scale[::step]
        first = first_row // step
        self.blocks[first : first + len(own), : own.shape[1]].copy_(own)

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        self.begin_rows(first_row)
        for rows in torch.split(tensor, max(1, _PART_NUMBERS // tensor.shape[1])):
            numbers, scale = round_rows(rows.to(self.scale.device))
            padded = F.pad(numbers.view(torch.uint8), (0, self._padding)).view(FLOAT8)
            self.words[first_row : first_row + len(rows)].copy_(pack(padded))
            self.scale[first_row : first_row + len(rows)].copy_(scale)
            first_row += len(rows)

    def wide(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Some rows in a wider type: exact with scales that are powers of two. A slice begins
        with a multiple of `BLOCK_ROWS`, or of the rows of a matrix."""
        blocks = None
        if self.blocks is not None:
            step = self._block_rows
            if isinstance(rows, slice):
                blocks = self.blocks[rows.start // step : -(-rows.stop // step)]
            else:
                blocks = self.blocks[rows // step]
        return widen(self.words[rows], self.scale[rows], self._size[1], dtype, blocks)


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, columns] -> numbers of float8_e4m3fn, and scales [n] float32: the least powers of
    two with which the largest number fits. A row that is not finite has such a scale."""
    rows = rows.float()
    largest = rows.abs().amax(1)
    scale = torch.exp2(torch.log2(largest / _LARGEST).ceil())
    # Below this a scale would be no normal number; rows of zeros have no least one.
    scale = torch.where(largest < 2.0**-100, 1.0, scale)
    return (rows / scale[:, None]).to(FLOAT8), scale
