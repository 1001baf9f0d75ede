"""Random matrices in every format of weights that stays what it is on a GPU, with their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from quantized_weights import Written, awq, gptq

from termgen.engine.device.layers.linear import LinearMethod
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.quantization.stored_matrices import PackedColumns, kept

_LEVELS = {"Q4_1": 7.5, "Q5_1": 15.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""The middle of the numbers of kinds that have an offset beside their scale."""
_SCALE_AT = {"Q6_K": 208}
_SPREAD = (0.5, 1.5)
"""How far the scales of blocks lie from their mean."""
GGUF_KINDS = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)


@dataclass
class Matrix:
    """A matrix in some format."""

    values: torch.Tensor  # [rows, columns] float32
    """What a file stands for, by another reader's account; of floats, they themselves."""
    stored: StoredRows | None = None
    """None: floats, which are rounded while they are loaded."""

    def load(self, method: LinearMethod, first_row: int = 0) -> None:
        if self.stored is None:
            method.load_rows(self.values, first_row)
        else:
            method.load_stored(self.stored, first_row)


Make = Callable[[int, int, int], Matrix]
"""(rows, columns, seed) -> a matrix whose products are about as large as what is multiplied."""


def floats(rows: int, columns: int, seed: int) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    return Matrix(torch.randn(rows, columns, generator=generator) * columns**-0.5)


def blocks(kind: str) -> Make:
    """Random bits, and scales that vary by a factor of three."""

    def make(rows: int, columns: int, seed: int) -> Matrix:
        quant = gguf.GGMLQuantizationType[kind]
        size, num_bytes = gguf.GGML_QUANT_SIZES[quant]
        rng = np.random.default_rng(seed)
        raw = rng.integers(0, 256, (rows * columns // size, num_bytes), dtype=np.uint8)
        spread = rng.uniform(*_SPREAD, len(raw))

        def scaled_by(factor: float) -> np.ndarray:
            scale = (spread * factor).astype(np.float16)
            at = _SCALE_AT.get(kind, 0)
            raw[:, at : at + 2] = scale[:, None].view(np.uint8)
            if kind in _LEVELS:
                sign = 1 if kind.endswith("K") else -1  # the files of K kinds subtract it
                offset = (sign * _LEVELS[kind] * scale.astype(np.float32)).astype(np.float16)
                raw[:, 2:4] = offset[:, None].view(np.uint8)
            return np.asarray(gguf.quants.dequantize(raw, quant), dtype=np.float32)

        values = scaled_by(columns**-0.5 / scaled_by(1.0).std())
        stored = torch.from_numpy(raw.reshape(rows, -1, num_bytes).copy())
        return Matrix(
            torch.from_numpy(values.reshape(rows, columns).copy()), StoredRows(kind, stored)
        )

    return make


def groups(bits: int, write: Callable[[torch.Tensor], Written], size: int) -> Make:
    """Integers in groups of `size` columns, as GPTQ and AWQ pack them."""

    def make(rows: int, columns: int, seed: int) -> Matrix:
        tensors, values = write(floats(rows, columns, seed).values)
        is_awq = "g_idx" not in tensors
        matrix = PackedColumns((rows, columns), bits, columns // size, is_awq, 0 if is_awq else 1)
        return Matrix(values, kept(matrix.integers(tensors, 0, rows)))

    return make


FORMATS: dict[str, tuple[str, Make]] = {
    **{kind: ("int8", blocks(kind)) for kind in GGUF_KINDS},
    **{f"GPTQ, groups of {size}": ("int8", groups(4, gptq(4, size), size)) for size in (32, 128)},
    "GPTQ, 8 bits": ("int8", groups(8, gptq(8, 64), 64)),
    **{f"AWQ, groups of {size}": ("int8", groups(4, awq(size), size)) for size in (64, 128)},
    "int8": ("int8", floats),
    "q4": ("q4", floats),
    "fp8": ("fp8", floats),
}
"""Name -> the engine's quantization, and matrices."""
