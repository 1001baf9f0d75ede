"""The quantised rows of a matrix while it is loaded."""

from __future__ import annotations

import torch

from termgen.engine.device.native.int8_blocks import BLOCK, Quantized


class GatheredRows:
    """Rows in any order, each once, until the last one: a matrix is packed as a whole then, so few
    at a time take the memory of both forms."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        """num_columns: filled up to whole blocks."""
        self._size = num_rows, num_columns
        self._device = device
        self._parts: Quantized | None = None
        self._num_missing = num_rows

    def add(self, loaded: Quantized, first_row: int) -> Quantized | None:
        """The whole matrix with its last row, else None. The scale of a row that is not finite is
        NaN then: it shows in the one parameter of floats."""
        if self._parts is None:
            self._parts = self._empty_parts()
        num_rows = len(loaded.row_scale)
        for part, rows in zip(self._parts, loaded, strict=True):
            part[first_row : first_row + num_rows].copy_(rows)
        self._num_missing -= num_rows
        assert self._num_missing >= 0, "loaded twice"
        if self._num_missing:
            return None
        whole, self._parts = self._parts, None
        is_finite = whole.scale.isfinite().all(1) & whole.low.isfinite().all(1)
        whole.row_scale.masked_fill_(~is_finite, float("nan"))
        return whole

    def _empty_parts(self) -> Quantized:
        num_rows, num_columns = self._size
        num_blocks, device = -(-num_columns // BLOCK), self._device
        return Quantized(
            torch.empty(num_rows, num_blocks * BLOCK, dtype=torch.uint8, device=device),
            torch.empty(num_rows, num_blocks, dtype=torch.float16, device=device),
            torch.empty(num_rows, num_blocks, dtype=torch.float16, device=device),
            torch.empty(num_rows, device=device),
        )
