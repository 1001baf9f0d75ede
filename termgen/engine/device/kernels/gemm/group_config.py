"""How products with a weight in groups of 8- or 4-bit integers are cut where nothing was measured
for its shape; for `group_gemm`."""

from __future__ import annotations

from dataclasses import replace

from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig

GROUP_COLUMNS = 32
SPARE_BYTES = 2048
"""Shared memory for all but the tiles."""
# Chosen on an H200, on the products of Llama 3.1 8B.
_LEAST_ROWS = 16
_BLOCK_N = 128
WALK_GROUPS = 128
"""Groups of a row up to which a program may keep all of x."""
_RESIDENT_WARPS = {4: 24, 8: 16}
"""Rows of a tile -> warps of programs that keep x, for each multiprocessor."""
_ENOUGH = 264
"""Programs, two for each multiprocessor: K is cut no further."""
_MOST_SPLITS = {16: 8, 32: 8, 64: 4, 128: 4}
"""Rows of x -> the most parts of K."""


def group_cut(
    band: int,
    out_features: int,
    in_features: int,
    num_bits: int,
    *,
    item_bytes: int,
    shared_bytes: int,
) -> SmallGemmConfig:
    """The configuration for up to `band` rows, one of `GROUP_BANDS`: a number of rows and those it
    is padded to in a recorded step share it, so padding changes no bit of a row.

    item_bytes: of a number of x. shared_bytes: shared memory that one program may have."""
    # Integers of 16 bits would lose a third of float32.
    if item_bytes == 2:
        if band == 1:
            return _gemv_cut(num_bits, -(-in_features // GROUP_COLUMNS))
        if band == 2 and num_bits == 4:
            return SmallGemmConfig("gemv", 2, 8, 64, 2)
    groups, block_m = -(-in_features // GROUP_COLUMNS), max(_LEAST_ROWS, band)
    tiles, splits = -(-out_features // _BLOCK_N), 1
    while splits < _MOST_SPLITS[block_m] and 2 * splits * tiles <= _ENOUGH:
        splits *= 2
    is_small = block_m == _LEAST_ROWS
    block_k = 8 if is_small and splits > 1 and num_bits == 4 else 4
    while splits > 1 and splits * 2 * block_k > groups:
        splits //= 2
    of_stage = stage_bytes(block_m, _BLOCK_N, block_k, num_bits, item_bytes)
    num_stages = max(1, min((shared_bytes - SPARE_BYTES) // of_stage, 3 if splits > 1 else 4))
    num_warps = 4 if is_small and num_bits == 8 else 8
    return SmallGemmConfig("mma", block_m, _BLOCK_N, block_k, num_warps, num_stages, splits)


def _gemv_cut(num_bits: int, groups: int) -> SmallGemmConfig:
    if num_bits == 8 or groups > WALK_GROUPS:
        return SmallGemmConfig("gemv", 1, GROUP_COLUMNS // num_bits, 128, 4)
    return walking(1, 4, groups)


def walking(band: int, rows: int, groups: int) -> SmallGemmConfig:
    """gemv of programs that take many tiles, of as many threads as a row has groups."""
    num_warps = 1
    while 32 * num_warps < groups:
        num_warps *= 2
    resident = _RESIDENT_WARPS[rows] // num_warps
    return SmallGemmConfig("gemv", band, rows, 32 * num_warps, num_warps, resident=resident)


def gated_cut(config: SmallGemmConfig | None, num_bits: int, groups: int) -> SmallGemmConfig | None:
    """The configuration for a gate's rows and those that it opens for, four of each in a tile; from
    that of their product. None: they are faster apart."""
    if config is None or config.kind != "gemv" or num_bits == 8:
        return None
    if config.resident:
        return walking(config.block_m, 8, groups)
    return replace(config, block_n=8)


def stage_bytes(block_m: int, block_n: int, block_k: int, num_bits: int, item_bytes: int) -> int:
    """Shared memory of the tiles of one stage: the weight's numbers and pairs, and x."""
    return block_k * (
        block_n * (GROUP_COLUMNS * num_bits // 8 + 4) + block_m * GROUP_COLUMNS * item_bytes
    )
