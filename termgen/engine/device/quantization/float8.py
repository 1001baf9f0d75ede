"""Weights in 8-bit floats on a GPU: a `LinearMethod` whose products read half the bytes.

Rows are rounded to float8_e4m3fn while they are loaded. A row of a matrix has one scale, a power
of two, so that what is stored times its scale is exact in 16 bits, too. Numbers that a file has in
this type stay what they are, with the file's scales: those of matrices and rows are a row's, and
those of blocks come in a table beside it, as `float8_gemm` takes it. Activations stay in 16 bits.
Few rows of activations are multiplied by `float8_gemm`, which widens the weight in registers; for
many a part of the weight at a time is widened in memory, for cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.kernels.gemm.float8_config import float8_cut
from termgen.engine.device.kernels.gemm.float8_gemm import (
    BLOCK_ROWS,
    FLOAT8,
    GROUP,
    RUN,
    float8_gemm,
    pack,
    widen,
)
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    MAX_ROWS,
    ROW_BANDS,
    SHIPPED_CAPABILITY,
    ByRows,
    Shape,
    Tuned,
    Weights,
    band_of,
    measured,
)
from termgen.engine.device.layers.linear import LinearMethod, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.triton_ops import SharedWorkspace
from termgen.engine.device.layers.weight_slot import empty_parameter
from termgen.engine.device.quantization.stored_matrices import (
    FLOAT8_BLOCKS,
    FLOAT8_KINDS,
    split_float8,
)

_LARGEST = torch.finfo(FLOAT8).max
_PART_NUMBERS = 2**26
"""Numbers of a weight that are widened, or rounded, at a time."""


class Float8Linears:
    """LinearMethodFactory: makes the layers of one model, which share a workspace."""

    def __init__(self, tuned: Tuned | None = None) -> None:
        """tuned: what was measured on this GPU."""
        self._shared = SharedWorkspace()
        self._tuned = tuned

    def __call__(self, spec: LinearSpec) -> LinearMethod:
        return Float8Linear(spec, self._shared, self._tuned)


class Float8Linear(nn.Module):
    """LinearMethod: 8 bits a number, 32 bits a row, and 32 for each block of a file."""

    kinds = FLOAT8_KINDS

    def __init__(
        self, spec: LinearSpec, shared: SharedWorkspace, tuned: Tuned | None = None
    ) -> None:
        super().__init__()
        size = (spec.out_features, spec.in_features)
        self._padding = -spec.in_features % GROUP
        num_words = (spec.in_features + self._padding) // 4
        self.words = empty_parameter(size[0], num_words, dtype=torch.int32, device=spec.device)
        self.scale = empty_parameter(size[0], dtype=torch.float32, device=spec.device)
        self.blocks: nn.Parameter | None = None
        """Scales of blocks; ones for rows that have none."""
        self._block_rows = BLOCK_ROWS
        self._spec = spec
        self._shared = shared
        self._tuned = tuned
        is_measured = is_hopper(spec.device)
        self._use({band: float8_cut(band, *size, is_measured) for band in ROW_BANDS})

    def _use(self, configs: ByRows) -> None:
        self._configs = configs
        for config in configs.values():
            if config is not None:
                self._shared.reserve(config, self._spec.out_features)

    def shapes(self) -> list[Shape]:
        weights: Weights = "fp8" if self.blocks is None else "fp8-blocks"
        return [Shape(self._spec.out_features, self._spec.in_features, weights)]

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        numbers, scale = split_float8(rows, self._spec.in_features)
        here = slice(first_row, first_row + len(numbers))
        padded = F.pad(numbers.to(self.words.device), (0, self._padding))
        self.words[here].copy_(pack(padded.view(FLOAT8)))
        self._begin_rows(first_row)
        if rows.kind == FLOAT8_BLOCKS:
            # Rows that a family has in another order may share none.
            own = scale[:: self._block_rows].repeat_interleave(self._block_rows, 0)
            if not torch.equal(own[: len(scale)], scale):
                self._begin_rows(1)
            self.scale[here] = 1.0
            self._keep_blocks(scale, first_row)
        else:
            self.scale[here].copy_(scale[:, 0])

    def _begin_rows(self, first_row: int) -> None:
        """Give each row scales of its own where a matrix begins among rows that share them."""
        if first_row % self._block_rows == 0:
            return
        if self.blocks is not None:
            wide = self.blocks.repeat_interleave(self._block_rows, 0)[: self._spec.out_features]
            self.blocks = nn.Parameter(wide.contiguous(), requires_grad=False)
        self._block_rows = 1

    def _keep_blocks(self, scale: torch.Tensor, first_row: int) -> None:
        """scale: [rows, blocks of 128 columns]"""
        step = self._block_rows
        if self.blocks is None:
            size = (-(-self._spec.out_features // step), 2 * self.words.shape[1] // RUN.value)
            ones = torch.ones(size, dtype=torch.float32, device=self.words.device)
            self.blocks = nn.Parameter(ones, requires_grad=False)
        own = scale[::step]
        first = first_row // step
        self.blocks[first : first + len(own), : own.shape[1]].copy_(own)

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        self._begin_rows(first_row)
        for rows in torch.split(tensor, max(1, _PART_NUMBERS // tensor.shape[1])):
            numbers, scale = round_rows(rows.to(self.scale.device))
            padded = F.pad(numbers.view(torch.uint8), (0, self._padding)).view(FLOAT8)
            self.words[first_row : first_row + len(rows)].copy_(pack(padded))
            self.scale[first_row : first_row + len(rows)].copy_(scale)
            first_row += len(rows)

    def finalize(self) -> None:
        """The kernels read the weight as it was loaded; only now is known what scales it has."""
        (shape,) = self.shapes()
        by_rows = measured(shape, self._spec.dtype, self._tuned)
        if by_rows is not None:
            self._use(by_rows)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows = x.shape[0]
        if not 0 < num_rows <= MAX_ROWS:
            return self._multiply_wide(x, bias)
        config = self._configs[band_of(num_rows)]
        if config is None:
            return self._multiply_wide(x, bias)
        workspace = self._shared.on(x.device)
        weight = (self.words, self.scale, bias)
        return float8_gemm(x, *weight, config=config, workspace=workspace, blocks=self.blocks)

    def _multiply_wide(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        step = max(1, _PART_NUMBERS // self._spec.in_features // BLOCK_ROWS) * BLOCK_ROWS
        parts = []
        for first in range(0, self._spec.out_features, step):
            part = slice(first, first + step)
            own = None if bias is None else bias[part]
            parts.append(F.linear(x, self._wide(part), own))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _wide(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Some rows in the model's type: exact with scales that are powers of two. A slice begins
        with a multiple of `BLOCK_ROWS`."""
        spec, blocks = self._spec, None
        if self.blocks is not None:
            step = self._block_rows
            if isinstance(rows, slice):
                blocks = self.blocks[rows.start // step : -(-rows.stop // step)]
            else:
                blocks = self.blocks[rows // step]
        words, scale = self.words[rows], self.scale[rows]
        return widen(words, scale, spec.in_features, spec.dtype, blocks)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._wide(ids)


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, columns] -> numbers of float8_e4m3fn, and scales [n] float32: the least powers of
    two with which the largest number fits. A row that is not finite has such a scale."""
    rows = rows.float()
    largest = rows.abs().amax(1)
    scale = torch.exp2(torch.log2(largest / _LARGEST).ceil())
    # Below this a scale would be no normal number; rows of zeros have no least one.
    scale = torch.where(largest < 2.0**-100, 1.0, scale)
    return (rows / scale[:, None]).to(FLOAT8), scale


def is_hopper(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == SHIPPED_CAPABILITY
