"""The matrices of a layer's experts in 4 or 8 bits on a GPU, all in one tensor for the kernel.

Each is rounded, or kept as a file has it, and packed by itself, so that no layer exists as floats.
All take 4 bits if each has no more than 16 levels, or the values of MXFP4, or if all are in NVFP4.
Columns of a file with groups in disorder are in the order of groups, one for each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

import torch
from torch import nn

from termgen.engine.device.kernels.gemm.group_layout import (
    COARSE,
    FLOAT_ZERO,
    GROUP,
    pack,
    pack_pairs,
    rows_aside,
    unpack,
)
from termgen.engine.device.kernels.moe.group_experts import GroupWeights
from termgen.engine.device.layers.linear import Build, LinearSpec
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.native.int8_blocks import Quantized, dequantize, quantize_rows
from termgen.engine.device.quantization.affine_blocks import ORDERED_GROUPS
from termgen.engine.device.quantization.column_orders import ColumnOrders
from termgen.engine.device.quantization.gathered_rows import RoundedLinear
from termgen.engine.device.quantization.halved_blocks import halved, rounded
from termgen.engine.device.quantization.mxfp4 import VALUES
from termgen.engine.device.quantization.stored_matrices import NVFP4

_PART_NUMBERS = 2**26
"""Numbers of a matrix that are rounded at a time."""


class Form(Enum):
    EIGHT_BITS = auto()
    FOUR_BITS = auto()
    FLOATS = auto()
    """4 bits (E2M1)."""
    HALVED = auto()
    """The same with a scale for every 16, and no offset."""

    @property
    def num_bits(self) -> int:
        return 8 if self is Form.EIGHT_BITS else 4


class GroupExperts(ExpertList):
    """A checkpoint fills them in any order."""

    def __init__(self, shape: tuple[int, int, int], build: Build, num_bits: int) -> None:
        """num_bits: 4 rounds all weights to 16 levels, whatever they were."""
        super().__init__(shape, build)
        self._matrices = [
            _Matrix(self._spec, self, expert, num_bits) for expert in range(len(self))
        ]
        self._form: Form | None = None
        self.orders: torch.Tensor | None
        """Those of `GroupWeights`."""
        self.register_buffer("orders", None)  # counts as a weight

    @property
    def _loaders(self) -> Sequence[_Matrix]:
        return self._matrices

    @property
    def form(self) -> Form | None:
        return self._form

    def finalize(self) -> None:
        assert self._form is not None, "no matrix was loaded"
        self.weights.check()

    @property
    def weights(self) -> GroupWeights:
        assert self._form is not None, "no matrix was loaded"
        return GroupWeights(
            *(self.words, self.pairs, self.row_scale, self.shape[2], self._form.num_bits),
            is_halved=self._form is Form.HALVED,
            orders=self.orders,
        )

    def keep(
        self,
        expert: int,
        whole: Quantized,
        order: torch.Tensor | None = None,
        *,
        is_halved: bool = False,
    ) -> None:
        """Store a whole matrix. order [columns]: the columns of x that those of the matrix meet.
        is_halved: it comes from `halved_blocks`."""
        form = Form.HALVED if is_halved else form_of(whole)
        if self._form is None:
            self.allocate(form)
        elif self._form is not form:
            self._change_to_8_bits()
            whole = rounded(whole) if is_halved else whole
        self.replace(expert, whole)
        if order is not None:
            self._orders_of_all()[expert] = order

    def _orders_of_all(self) -> torch.Tensor:
        if self.orders is None:
            places = torch.arange(self.shape[2], dtype=torch.int32, device=self._spec.device)
            self.orders = places.repeat(len(self), 1)
        return self.orders

    def replace(self, expert: int, whole: Quantized) -> None:
        """Store a matrix in the present form, which can hold it. Nothing waits for the GPU."""
        assert self._form is not None
        is_float = self._form is Form.FLOATS
        # Those of `Form.HALVED` are codes already.
        numbers = _codes(whole.numbers) if is_float else whole.numbers
        num_bits = self._form.num_bits
        self.words[expert] = pack(numbers, num_bits)
        self.pairs[expert] = pack_pairs(whole.scale, None if is_float else whole.low, num_bits)
        self.row_scale[expert] = whole.row_scale

    def allocate(self, form: Form) -> None:
        """Make room for matrices of a form."""
        num, num_rows, num_columns = self.shape
        groups, rows = -(-num_columns // GROUP.value), rows_aside(form.num_bits)
        device = self._spec.device
        pair_type = torch.int16 if form is Form.FLOATS else torch.int32
        words = torch.zeros(num, num_rows, groups * form.num_bits, dtype=torch.int32, device=device)
        pairs = torch.zeros(num, -(-num_rows // rows), groups, rows, dtype=pair_type, device=device)
        self.words = nn.Parameter(words, requires_grad=False)
        self.pairs = nn.Parameter(pairs, requires_grad=False)
        self.row_scale = nn.Parameter(
            torch.zeros(num, num_rows, device=device), requires_grad=False
        )
        self._form = form

    def _change_to_8_bits(self) -> None:
        """Keep what is stored, in 8 bits: the matrices are not alike."""
        if self._form is Form.EIGHT_BITS:
            return
        kept = [self.stored(expert) for expert in range(len(self))]
        if self._form is Form.HALVED:
            kept = [rounded(whole) for whole in kept]
        self.allocate(Form.EIGHT_BITS)
        for expert, whole in enumerate(kept):
            self.replace(expert, whole)

    def stored(self, expert: int) -> Quantized:
        """A matrix that was kept, its columns filled up to whole groups; zeros if none was. In
        `Form.HALVED` it is as `halved_blocks` has it."""
        assert self._form is not None
        num_rows = self.shape[1]
        numbers = unpack(self.words[expert], self._form.num_bits)
        halves = self.pairs[expert].transpose(1, 2).flatten(0, 1)[:num_rows].reshape(-1)
        halves = halves.view(torch.float16)
        if self._form is Form.FLOATS:
            numbers, scale = _levels(numbers), halves.view(num_rows, -1)
            low = scale * -FLOAT_ZERO.value
        else:
            scale, low = halves.view(num_rows, -1, 2).unbind(2)
        return Quantized(numbers, scale, low, self.row_scale[expert])


class _Matrix(RoundedLinear):
    """Loads the matrix of one expert. Its parts in a file, those of gate and of up, stay what they
    are if they have one order of columns, and both or neither are in NVFP4; others are rounded to
    8 bits."""

    kinds = RoundedLinear.kinds | {ORDERED_GROUPS, NVFP4}
    part_numbers = _PART_NUMBERS

    def __init__(self, spec: LinearSpec, experts: GroupExperts, expert: int, num_bits: int) -> None:
        super().__init__(spec)
        self.num_bits = num_bits
        self._place = experts, expert
        self._orders = ColumnOrders()

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        if rows.order is not None:
            self._orders.note(rows.order.to(self._spec.device), first_row, len(rows.blocks))
        if rows.kind != NVFP4:
            super().load_stored(rows, first_row)
            return
        self._orders.note_halved(Form.HALVED.num_bits, first_row, len(rows.blocks))
        here = rows.blocks.to(self._spec.device)
        self._add(halved(replace(rows, blocks=here)), first_row)

    def _keep(self, whole: Quantized) -> None:
        experts, expert = self._place
        runs = self._orders.runs(self._spec.out_features)
        if len(runs) > 1:
            for first, end, order in runs:
                part = Quantized(*(of_whole[first:end] for of_whole in whole))
                for into, numbers in zip(part, self._alike(part, order), strict=True):
                    into.copy_(numbers)
            experts.keep(expert, whole)
            return
        ((_, _, order),) = runs
        own = self._orders.orders[order] if order > 0 else None
        experts.keep(expert, whole, own, is_halved=order < 0)

    def _alike(self, rows: Quantized, order: int) -> Quantized:
        """Rows with one scale for 32 columns, which are in the order of x."""
        if order <= 0:
            return rounded(rows) if order < 0 else rows
        columns = self._orders.orders[order]
        assert columns is not None
        values = dequantize(rows)
        return quantize_rows(torch.empty_like(values).index_copy_(1, columns, values))


def form_of(whole: Quantized) -> Form:
    """The smallest form that has all of a matrix's numbers."""
    numbers, scale, low, _ = whole
    if torch.equal(numbers & 15, numbers >> 4):
        return Form.FOUR_BITS
    if torch.equal(low, scale * -FLOAT_ZERO.value) and _are_levels(numbers):
        return Form.FLOATS
    return Form.EIGHT_BITS


def _table(device: torch.device) -> torch.Tensor:
    """The level of each code of 4 bits, [16] uint8."""
    levels = [int(2 * value) + FLOAT_ZERO.value for value in VALUES]
    return torch.tensor(levels, dtype=torch.uint8, device=device)


def _are_levels(numbers: torch.Tensor) -> bool:
    found = torch.zeros(256, dtype=torch.bool, device=numbers.device)
    found[_table(numbers.device).long()] = True
    return bool(found[numbers.int()].all())


def _codes(levels: torch.Tensor) -> torch.Tensor:
    """Levels -> codes, each in both halves of a byte, as `pack` takes them."""
    codes = torch.zeros(256, dtype=torch.uint8, device=levels.device)
    # Both zeros have one level; the positive one is taken.
    order = torch.tensor([*range(8), *range(9, 16)], dtype=torch.uint8, device=levels.device)
    codes[_table(levels.device)[order.long()].long()] = order
    doubled: torch.Tensor = codes[levels.int()] * COARSE.value
    return doubled


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `_codes`."""
    return _table(codes.device)[(codes & 15).int()]
