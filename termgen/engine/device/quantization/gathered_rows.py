"""The rows of a matrix while it is loaded: rounded, or kept as a file has them, and gathered."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.layers.linear import LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.native.int8_blocks import (
    BLOCK,
    Quantized,
    keep_rows,
    quantize_rows,
)
from termgen.engine.device.quantization.affine_blocks import KINDS, affine
from termgen.engine.device.quantization.gguf_blocks import ROUNDED, expanded


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


class RoundedLinear(nn.Module):
    """The loading half of a LinearMethod with a scale and an offset for every 32 numbers. Blocks of
    a file keep their numbers, where their type has no more scales than that; of other types they
    are expanded on the device."""

    kinds = KINDS | ROUNDED
    num_bits = 8
    """4: weights have 16 levels. What has no more in a file keeps them."""
    part_numbers: int
    """Numbers rounded at a time."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self._spec = spec
        self._padding = -spec.in_features % BLOCK
        self._gathered = GatheredRows(spec.out_features, spec.in_features, spec.device)

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        for rows in torch.split(tensor, max(1, self.part_numbers // tensor.shape[1])):
            padded = F.pad(rows.to(self._spec.device), (0, self._padding))
            self._add(quantize_rows(padded, self.num_bits), first_row)
            first_row += len(rows)

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        assert not self._padding, "blocks of a file are whole"
        step = max(1, self.part_numbers // self._spec.in_features)
        for blocks in torch.split(rows.blocks, step):
            here = blocks.to(self._spec.device)
            if rows.kind in ROUNDED:
                self.load_rows(expanded(rows.kind, here), first_row)
            else:
                part = affine(replace(rows, blocks=here))
                self._add(keep_rows(*part, len(blocks), self.num_bits), first_row)
            first_row += len(blocks)

    def _add(self, loaded: Quantized, first_row: int) -> None:
        whole = self._gathered.add(loaded, first_row)
        if whole is not None:
            self._keep(whole)

    @abstractmethod
    def _keep(self, whole: Quantized) -> None:
        """Make of the whole matrix what products read."""
