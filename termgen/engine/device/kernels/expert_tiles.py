"""How the experts' products are cut into tiles, by how many tokens an expert gets on average.

Imports no triton. A number of tokens and those it is padded to in a recorded step share one cut, so
padding changes no bit of a token's result: the cut goes by the next power of two, and the sizes of
recordings hold every power of two below the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

from termgen.engine.device.kernels.launch import next_power_of_2

LARGEST_ROWS = 8192
"""Numbers of tokens from which on nothing changes any more."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's part of a product. Up to 96 KiB of tiles in flight fit every supported GPU."""

    block_n: int
    """Rows of the weight; of gate and of up each, where both are multiplied."""
    block_k: int
    num_warps: int
    num_stages: int
    group: int
    """Tiles of tokens that go through the weight side by side, so that it is read once for them."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The cut of both products, which share their tiles of tokens."""

    block_m: int
    """Pairs of a token and an expert in a tile, all of one expert; at least 16."""
    gate_up: Tile
    down: Tile
    chunk: int
    """Pairs that one program sorts by expert."""
    scan: int
    """Pairs that it counts at a time."""


_HALF = {  # average number of tokens of an expert, at most -> tiles
    8: ExpertTiles(16, Tile(32, 128, 4, 4, 1), Tile(32, 128, 4, 4, 1), chunk=32, scan=512),
    16: ExpertTiles(32, Tile(32, 128, 4, 4, 1), Tile(64, 128, 4, 4, 1), chunk=64, scan=2048),
    64: ExpertTiles(64, Tile(64, 64, 4, 4, 4), Tile(64, 64, 4, 4, 4), chunk=64, scan=2048),
    LARGEST_ROWS: ExpertTiles(
        128, Tile(64, 64, 8, 3, 16), Tile(128, 64, 8, 3, 16), chunk=128, scan=4096
    ),
}
_FLOAT = ExpertTiles(16, Tile(32, 32, 4, 2, 1), Tile(32, 32, 4, 2, 1), chunk=32, scan=512)


def choose_tiles(num_tokens: int, *, num_experts: int, top_k: int, itemsize: int) -> ExpertTiles:
    if itemsize == 4:
        return _FLOAT
    rows = min(next_power_of_2(num_tokens), LARGEST_ROWS)
    average = min(rows * top_k / num_experts, rows)
    return next(tiles for most, tiles in _HALF.items() if average <= most)


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Tiles of tokens that so many pairs can fill, however they fall to the experts."""
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m
