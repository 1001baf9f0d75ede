"""What was measured to be best on a Hopper GPU; written by `benchmarks/gpu_gemm.py`."""

from __future__ import annotations

from termgen.engine.kernels.small_gemm_config import Table

MEASURED: Table = {}
