"""The matrices of a layer's experts in main memory, filled as those on a GPU are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from termgen.engine.device.layers.linear import Build, LinearSpec
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.native.int8_blocks import Int8Blocks, Quantized
from termgen.engine.device.quantization.gathered_rows import RoundedLinear
from termgen.engine.device.quantization.group_experts import Form, form_of

_CARD_BITS = {Form.EIGHT_BITS: 9.0, Form.FOUR_BITS: 5.0, Form.FLOATS: 4.5, Form.HALVED: 5.0}
"""Bits that a weight takes on a GPU."""
_PART_NUMBERS = 2**26
"""Numbers of a matrix that are rounded at a time, on the GPU."""


class HostExperts(ExpertList):
    """Matrices of a layer. They are no parameters of the model, whose weights are the GPU's."""

    def __init__(self, shape: tuple[int, int, int], build: Build, num_bits: int) -> None:
        """num_bits: 4 rounds all weights to 16 levels, whatever they were."""
        super().__init__(shape, build)
        self.build = build
        self._matrices = [_Matrix(self._spec, num_bits) for _ in range(shape[0])]
        self.places: nn.Module | None = None
        """The layer's `ExpertPlaces`, once all are loaded."""

    @property
    def _loaders(self) -> Sequence[_Matrix]:
        return self._matrices

    @property
    def card_bytes(self) -> int:
        """Bytes of all matrices, were they on the GPU."""
        num, num_rows, num_columns = self.shape
        return int(num * num_rows * num_columns * _CARD_BITS[self.form] / 8)

    @property
    def form(self) -> Form:
        """The form on the GPU that has room for any of them."""
        forms = {matrix.form for matrix in self._matrices}
        return forms.pop() if len(forms) == 1 else Form.EIGHT_BITS

    @property
    def blocks(self) -> list[Int8Blocks]:
        """The loaded matrices, numbers of all in 4 bits or of all in 8."""
        found = [matrix.blocks for matrix in self._matrices]
        if len({blocks.num_bits for blocks in found}) > 1:
            for matrix, blocks in zip(self._matrices, found, strict=True):
                if blocks.num_bits == 4:
                    matrix.blocks = Int8Blocks(blocks.quantized(), num_bits=8)
        return [matrix.blocks for matrix in self._matrices]

    def finalize(self) -> None:
        assert self.places is not None, "not placed"


class _Matrix(RoundedLinear):
    part_numbers = _PART_NUMBERS
    blocks: Int8Blocks
    form: Form

    def __init__(self, spec: LinearSpec, num_bits: int) -> None:
        super().__init__(spec)
        self.num_bits = num_bits

    def _keep(self, whole: Quantized) -> None:
        self.form = form_of(whole)
        self.blocks = Int8Blocks(whole, num_bits=4 if self.form is Form.FOUR_BITS else 8)
