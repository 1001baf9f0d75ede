"""The matrices of a layer's experts in blocks, on a CPU, for the kernel that computes them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from termgen.engine.device.layers.linear import Build, LinearMethodFactory
from termgen.engine.device.layers.matrix_list import MatrixList
from termgen.engine.device.native import why_unusable
from termgen.engine.device.quantization.int8 import Int8Linear

if TYPE_CHECKING:
    from termgen.engine.device.native.experts import BlockTable


class BlockExperts(MatrixList):
    """Each is an `Int8Linear`, and can be multiplied alone."""

    def __init__(
        self, shape: tuple[int, int, int], build: Build, make_method: LinearMethodFactory
    ) -> None:
        super().__init__(shape, build, make_method)
        self.table: BlockTable | None = None
        """Set once they are loaded, if the kernel covers them."""
        self.counts = torch.zeros(len(self), dtype=torch.int64)
        """How many tokens went to each expert; kept by those matrices that are multiplied first."""

    def finalize(self) -> None:
        super().finalize()
        if why_unusable():
            return
        from termgen.engine.device.native.experts import BlockTable

        blocks = []
        for method in self._methods:
            assert isinstance(method, Int8Linear), method
            blocks.append(method.blocks)
        self.table = BlockTable.of(blocks)
