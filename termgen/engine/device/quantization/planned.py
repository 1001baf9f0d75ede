"""The forms that a model's weights will have on a GPU, without the weights: `termgen tune` measures
what an engine is going to multiply.

A `PlannedLinear` takes the place of a layer's storage. It notes where rows come from instead of
keeping them, and says what the layer's products would be.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.kernels.gemm.small_gemm_config import Shape, Weights
from termgen.engine.device.layers.linear import LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.quantization.affine_blocks import (
    GROUPS,
    GROUPS_BLOCK,
    LARGEST_NIBBLE,
    OF_16_LEVELS,
    ORDERED_GROUPS,
)
from termgen.engine.device.quantization.column_orders import ColumnOrders
from termgen.engine.device.quantization.gathered_rows import RoundedLinear
from termgen.engine.device.quantization.halved_blocks import WIDTHS
from termgen.engine.device.quantization.stored_matrices import FLOAT8_BLOCKS, FLOAT8_KINDS, NVFP4

TILE = 32
"""Rows whose numbers have one width."""
_MOST_RUNS = 4
"""A matrix with more runs of tiles of one width is kept in 8 bits: each is a kernel of its own."""


def widths(numbers: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first row, end, bits) of each run. numbers: [rows, columns] uint8."""
    is_coarse = [((part & 15) == (part >> 4)).all(1) for part in torch.split(numbers, 64 * TILE)]
    return _runs(torch.cat(is_coarse))


def _runs(is_coarse: torch.Tensor) -> list[tuple[int, int, int]]:
    """is_coarse [rows]: those with no more than 16 levels."""
    num_rows = len(is_coarse)
    tiles = F.pad(is_coarse, (0, -num_rows % TILE), value=True).view(-1, TILE).all(1).tolist()
    runs, first = [], 0
    for flag, of_run in groupby(tiles):
        end = min(first + TILE * len(list(of_run)), num_rows)
        runs.append((first, end, 4 if flag else 8))
        first = end
    return runs if len(runs) <= _MOST_RUNS else [(0, num_rows, 8)]


def group_shape(num_rows: int, num_columns: int, num_bits: int) -> Shape:
    return Shape(num_rows, num_columns, "int8" if num_bits == 8 else "int4")


class PlannedLinear(nn.Module):
    """LinearMethod without numbers, on torch's meta device."""

    kinds: frozenset[str]

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self._spec = spec

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        """Rows that will be rounded."""

    @abstractmethod
    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        """Rows that stay what they are. Of their blocks no more counts than what the kind does not
        say: how many levels the numbers of groups have."""

    def finalize(self) -> None:
        """There is nothing to prepare."""

    @abstractmethod
    def shapes(self) -> list[Shape]: ...

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("a plan has no numbers to multiply")

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a plan has no numbers to look up")


class PlannedGroups(PlannedLinear):
    """In place of `GroupLinear`."""

    kinds = RoundedLinear.kinds | {ORDERED_GROUPS, NVFP4}
    num_bits = 8

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        self._is_coarse = torch.zeros(spec.out_features, dtype=torch.bool)
        self._orders = ColumnOrders()

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        is_coarse = rows.kind in OF_16_LEVELS
        if rows.kind in (GROUPS, ORDERED_GROUPS):
            is_coarse = int(rows.blocks[:, :, :GROUPS_BLOCK].max()) <= LARGEST_NIBBLE
        self._is_coarse[first_row : first_row + len(rows.blocks)] = is_coarse
        if 0 < (halved_bits := WIDTHS.get(rows.kind, 0)) <= self.num_bits:
            self._orders.note_halved(halved_bits, first_row, len(rows.blocks))
        if rows.order is not None:
            self._orders.note(rows.order, first_row, len(rows.blocks))

    def shapes(self) -> list[Shape]:
        k, found = self._spec.in_features, []
        for first, end, order in self._orders.runs(self._spec.out_features):
            if order < 0:
                found.append(group_shape(end - first, k, -order))
                continue
            runs = self._runs_of(self._is_coarse[first:end])
            found += [group_shape(last - begin, k, bits) for begin, last, bits in runs]
        return found

    @staticmethod
    def _runs_of(is_coarse: torch.Tensor) -> list[tuple[int, int, int]]:
        return _runs(is_coarse)


class PlannedGroups4(PlannedGroups):
    """In place of `Group4Linear`."""

    num_bits = 4

    @staticmethod
    def _runs_of(is_coarse: torch.Tensor) -> list[tuple[int, int, int]]:
        return [(0, len(is_coarse), 4)]


class PlannedFloat8(PlannedLinear):
    """In place of `Float8Linear`."""

    kinds = FLOAT8_KINDS

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        self._weights: Weights = "fp8"

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        if rows.kind == FLOAT8_BLOCKS:
            self._weights = "fp8-blocks"

    def shapes(self) -> list[Shape]:
        return [Shape(self._spec.out_features, self._spec.in_features, self._weights)]
