"""8-bit and 4-bit weights on the CPU: a `LinearMethod` over the blocks of `native.int8_blocks`.

Rows are quantized while they are loaded, so the float model never exists as a whole. Activations
stay float32, in steps of any size: rounding them to 8 bits would be as fast but costs far more
accuracy, and bfloat16 factors in large steps would let other requests change a request's tokens.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.kernels.gemm.small_gemm_config import Shape
from termgen.engine.device.layers.linear import LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.native import why_unusable
from termgen.engine.device.native.int8_blocks import (
    TILE,
    Int8Blocks,
    Quantized,
)
from termgen.engine.device.quantization.gathered_rows import RoundedLinear
from termgen.engine.device.quantization.halved_blocks import halved
from termgen.errors import ConfigError

_MOST_ROWS = 48
"""Up to this many rows of activations the kernel beats widening the weight to floats first
(SmolLM2-135M's shapes on two cores: alike from 48 to 100)."""
_CHUNK_NUMBERS = 2**20
"""Numbers widened at a time: a part of the weight that stays in cache."""
_HALVED = frozenset({"Q6_K"})
"""Kinds of blocks whose numbers have 6 bits and a scale for every 16."""
_memory = threading.local()


class Int8Linear(RoundedLinear):
    """LinearMethod: 8 bits a number, and 32 bits for every 32 of them.

    A tied embedding needs no second copy: `embed` looks rows up in the quantized head.
    """

    part_numbers = 2**18
    """What each pass over them reads and writes stays in cache."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        if spec.device.type != "cpu":
            raise ConfigError(
                "weights in integers are for a CPU or an NVIDIA GPU, not for"
                f" {spec.device.type}; leave the quantization out or use --device cpu",
                param="quantization",
            )
        self._blocks: Int8Blocks | None = None
        self._halved: torch.Tensor | None = None
        """[out_features] the rows with 6 bits a number, while they are loaded."""
        self._most_rows = -1 if why_unusable() else _MOST_ROWS

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        if rows.kind not in _HALVED or self.num_bits < 8:
            super().load_stored(rows, first_row)
            return
        if self._halved is None:
            self._halved = torch.zeros(self._spec.out_features, dtype=torch.bool)
        step = max(1, self.part_numbers // self._spec.in_features)
        for blocks in torch.split(rows.blocks, step):
            self._halved[first_row : first_row + len(blocks)] = True
            self._add(halved(replace(rows, blocks=blocks)), first_row)
            first_row += len(blocks)

    def _keep(self, whole: Quantized) -> None:
        self._blocks = Int8Blocks(whole, halved=self._halved)
        self._halved = None
        self.tiles = self._blocks.tiles  # counts as a weight
        self.row_scale = nn.Parameter(self._blocks.row_scale, requires_grad=False)

    def finalize(self) -> None:
        assert self._blocks is not None, "not all rows were loaded"

    @property
    def blocks(self) -> Int8Blocks:
        assert self._blocks is not None, "not finalized"
        return self._blocks

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        blocks, dtype = self._blocks, x.dtype
        assert blocks is not None, "not finalized"
        # A step of one row makes a hundred of these calls: what has nothing to do is left out.
        if self._padding:
            x = F.pad(x, (0, self._padding))
        if dtype is not torch.float32:
            x = x.float()
        y = self._multiply_wide(x, blocks) if x.shape[0] > self._most_rows else blocks.product(x)
        if dtype is not torch.float32:
            y = y.to(dtype)
        return y if bias is None else y.add_(bias)

    def _multiply_wide(self, x: torch.Tensor, blocks: Int8Blocks) -> torch.Tensor:
        """x [M, columns] float32 -> [M, out_features] float32."""
        y = x.new_empty(len(x), blocks.num_tiles * TILE)
        step = max(1, _CHUNK_NUMBERS // (blocks.num_columns * TILE))
        for first in range(0, blocks.num_tiles, step):
            columns = blocks.columns_of(first, first + step, _scratch())
            torch.mm(x, columns, out=y[:, first * TILE : first * TILE + columns.shape[1]])
        return y[:, : self._spec.out_features].contiguous()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        assert self._blocks is not None, "not finalized"
        return self._blocks.rows(ids)[:, : self._spec.in_features].to(self._spec.dtype)

    def shapes(self) -> list[Shape]:
        return []


class Q4Linear(Int8Linear):
    """LinearMethod: 4 bits a number, and 32 bits for every 32 of them."""

    num_bits = 4


def _scratch() -> torch.Tensor:
    """This thread's memory for a chunk, which all layers share."""
    if not hasattr(_memory, "chunk"):
        _memory.chunk = torch.empty(_CHUNK_NUMBERS + _CHUNK_NUMBERS // 8)
    chunk: torch.Tensor = _memory.chunk
    return chunk
