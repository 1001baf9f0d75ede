"""Weights in 8-bit floats on a GPU: a `LinearMethod` whose products read half the bytes.

A row of a matrix has one scale, a power of two, so that what is stored times its scale is exact in
16 bits, too. Rows are rounded to float8_e4m3fn while they are loaded. Activations stay in 16 bits.
Few rows of activations are multiplied by `float8_gemm`, which widens the weight in registers; for
many a part of the weight at a time is widened in memory, for cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.kernels.gemm.float8_gemm import (
    FLOAT8,
    GROUP,
    RUN,
    float8_gemm,
    pack,
    widen,
)
from termgen.engine.device.kernels.gemm.float8_table import MEASURED
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    MAX_ROWS,
    ROW_BANDS,
    SHIPPED_CAPABILITY,
    SmallGemmConfig,
    band_of,
    nearest,
)
from termgen.engine.device.layers.linear import LinearMethod, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.triton_ops import SharedWorkspace
from termgen.engine.device.layers.weight_slot import empty_parameter

_LARGEST = torch.finfo(FLOAT8).max
_PART_NUMBERS = 2**26
"""Numbers of a weight that are widened, or rounded, at a time."""
_LEAST_MMA_ROWS, _MOST_GEMV_ROWS = 16, 2


class Float8Linears:
    """LinearMethodFactory: makes the layers of one model, which share a workspace."""

    def __init__(self) -> None:
        self._shared = SharedWorkspace()

    def __call__(self, spec: LinearSpec) -> LinearMethod:
        return Float8Linear(spec, self._shared)


class Float8Linear(nn.Module):
    """LinearMethod: 8 bits a number, and 32 bits a row."""

    kinds: frozenset[str] = frozenset()

    def __init__(self, spec: LinearSpec, shared: SharedWorkspace) -> None:
        super().__init__()
        size = (spec.out_features, spec.in_features)
        self._padding = -spec.in_features % GROUP
        num_words = (spec.in_features + self._padding) // 4
        self.words = empty_parameter(size[0], num_words, dtype=torch.int32, device=spec.device)
        self.scale = empty_parameter(size[0], dtype=torch.float32, device=spec.device)
        self._spec = spec
        self._shared = shared
        is_measured = is_hopper(spec.device)
        self._configs = {band: choose(band, *size, is_measured) for band in ROW_BANDS}
        for config in self._configs.values():
            shared.reserve(config, spec.out_features)

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        raise AssertionError(f"{rows.kind} is not among the kinds that this keeps")

    def load_rows(self, tensor: torch.Tensor, first_row: int) -> None:
        for rows in torch.split(tensor, max(1, _PART_NUMBERS // tensor.shape[1])):
            numbers, scale = round_rows(rows.to(self.scale.device))
            padded = F.pad(numbers.view(torch.uint8), (0, self._padding)).view(FLOAT8)
            self.words[first_row : first_row + len(rows)].copy_(pack(padded))
            self.scale[first_row : first_row + len(rows)].copy_(scale)
            first_row += len(rows)

    def finalize(self) -> None:
        """The kernels read the weight as it was loaded."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows = x.shape[0]
        if not 0 < num_rows <= MAX_ROWS:
            return self._multiply_wide(x, bias)
        config = self._configs[band_of(num_rows)]
        workspace = self._shared.on(x.device)
        return float8_gemm(x, self.words, self.scale, bias, config=config, workspace=workspace)

    def _multiply_wide(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        step = max(1, _PART_NUMBERS // self._spec.in_features)
        parts = []
        for first in range(0, self._spec.out_features, step):
            part = slice(first, first + step)
            own = None if bias is None else bias[part]
            parts.append(F.linear(x, self._wide(part), own))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _wide(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Some rows in the model's type, exactly."""
        spec = self._spec
        return widen(self.words[rows], self.scale[rows], spec.in_features, spec.dtype)

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


def choose(
    band: int, out_features: int, in_features: int, is_measured: bool = True
) -> SmallGemmConfig:
    """The configuration for up to `band` rows, one of `ROW_BANDS`: a number of rows and those it is
    padded to in a recorded step share it, so padding changes no bit of a row.

    is_measured: this GPU is of the generation that the table was measured on.
    """
    by_rows = nearest(out_features, in_features, MEASURED) if is_measured else None
    if by_rows is not None and (config := by_rows[band]) is not None:
        return config
    if band <= _MOST_GEMV_ROWS:
        return SmallGemmConfig("gemv", band, 8, 256, 4, 3)
    # Two stages of at most 64 rows, 96 KiB, fit the shared memory of every GPU that has the type.
    return SmallGemmConfig("mma", max(_LEAST_MMA_ROWS, band), 64, RUN.value, 4, 2)


def is_hopper(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == SHIPPED_CAPABILITY
