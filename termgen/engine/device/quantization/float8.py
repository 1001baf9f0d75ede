"""Weights in 8-bit floats on a GPU: a `LinearMethod` whose products read half the bytes.

Rows are rounded to float8_e4m3fn while they are loaded; numbers that a file has in this type stay
what they are, with the file's scales (`float8_rows`). Activations stay in 16 bits.
Few rows of activations are multiplied by `float8_gemm`, which widens the weight in registers; for
many a part of the weight at a time is widened in memory, for cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from termgen.engine.device.kernels.gemm.float8_config import float8_cut
from termgen.engine.device.kernels.gemm.float8_gemm import BLOCK_ROWS, float8_gemm
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
from termgen.engine.device.layers.triton_ops import SharedWorkspace
from termgen.engine.device.quantization.float8_rows import Float8Rows

_PART_NUMBERS = 2**26
"""Numbers of a weight that are widened at a time."""


class Float8Linears:
    """LinearMethodFactory: makes the layers of one model, which share a workspace."""

    def __init__(self, tuned: Tuned | None = None) -> None:
        """tuned: what was measured on this GPU."""
        self._shared = SharedWorkspace()
        self._tuned = tuned

    def __call__(self, spec: LinearSpec) -> LinearMethod:
        return Float8Linear(spec, self._shared, self._tuned)


class Float8Linear(Float8Rows):
    """LinearMethod."""

    def __init__(
        self, spec: LinearSpec, shared: SharedWorkspace, tuned: Tuned | None = None
    ) -> None:
        size = (spec.out_features, spec.in_features)
        super().__init__(*size, spec.device)
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
            parts.append(F.linear(x, self.wide(part, self._spec.dtype), own))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.wide(ids, self._spec.dtype)


def is_hopper(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == SHIPPED_CAPABILITY
