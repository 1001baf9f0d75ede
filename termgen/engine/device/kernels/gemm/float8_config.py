"""How products with a weight of 8-bit floats are cut where nothing was measured for its shape on
this GPU; for `float8_gemm`."""

from __future__ import annotations

from termgen.engine.device.kernels.gemm.float8_table import MEASURED
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig, nearest

RUN_WORDS = 64
"""Words of a tile on the matrix units."""
_LEAST_MMA_ROWS, _MOST_GEMV_ROWS = 16, 2


def float8_cut(
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
    return SmallGemmConfig("mma", max(_LEAST_MMA_ROWS, band), 64, RUN_WORDS, 4, 2)
