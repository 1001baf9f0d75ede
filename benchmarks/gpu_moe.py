"""Mixtures of experts on a CUDA device: every kernel, and other tilings of the two products.

    python benchmarks/gpu_moe.py [--models NAME ...] [--rows T ...]

A time is that of one call inside a CUDA graph that holds a chain of them, with different tokens
that choose different experts each time. A tiling's result is compared with the reference first: a
wrong one is reported, not timed. The floor is the larger of reading each expert in use once and of
the arithmetic. `now` is the choice of termgen/engine/device/kernels/moe/experts.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from gpu_gemm import COMPILE_THREADS, DEVICE, MAX_ERROR, error_of, time_chain
from gpu_shapes import READ_BYTES_PER_SECOND
from triton.runtime.errors import TritonError

from termgen.engine.device.kernels.moe.experts import Tile, choose_tiles, experts, multiply
from termgen.engine.device.kernels.moe.routing import PairTiles, route, sort_pairs
from termgen.engine.device.layers.ops import TorchOps, run_experts

SHAPES = {  # hidden, inner, experts, experts of a token
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}
FLOP_PER_SECOND = 8.0e14
"""Sustained rate of one H100 in dense products of a 16-bit type."""
VARIED = 6  # sets of tokens in a chain
BLOCKS_M = (16, 32, 64, 128)
MANY_ROWS = 512  # beyond this only the larger tiles are worth trying
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Candidate:
    """One tiling of one of the products."""

    block_m: int
    tile: Tile

    def __str__(self) -> str:
        t = self.tile
        return f"{self.block_m}x{t.block_n}x{t.block_k} w{t.num_warps} s{t.num_stages} g{t.group}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256, 4096])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    return args


def candidates(block_m: int, *, gated: bool) -> list[Candidate]:
    """block_n, block_k, warps, stages, group: the likelier ones first."""
    shapes = {
        16: [(32, 128, 4, 4, 1), (16, 256, 2, 4, 1), (64, 128, 4, 3, 1), (64, 64, 4, 5, 1)],
        32: [(32, 128, 4, 4, 1), (64, 128, 4, 3, 1), (64, 64, 4, 4, 2)],
        64: [(64, 64, 4, 4, 4), (64, 64, 4, 4, 16), (128, 64, 8, 3, 8)],
        128: [(64, 64, 8, 3, 16), (128, 64, 8, 3, 16), (128, 64, 8, 3, 8)],
    }[block_m]
    if not gated and block_m == BLOCKS_M[-1]:
        shapes = [*shapes, (256, 64, 8, 3, 16), (128, 64, 8, 4, 16)]
    return [Candidate(block_m, Tile(*shape)) for shape in shapes]


class Mixture:
    """One layer's experts, and sets of tokens for them."""

    def __init__(self, name: str) -> None:
        self.name = name
        hidden, inner, num_experts, self.top_k = SHAPES[name]
        self.num_experts = num_experts
        self._generator = torch.Generator(DEVICE).manual_seed(hidden)
        self.gate_up = self._normal(num_experts, 2 * inner, hidden, scale=hidden**-0.5)
        self.down = self._normal(num_experts, hidden, inner, scale=inner**-0.5)
        self.stream = torch.cuda.Stream()

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, dtype=DTYPE, device=DEVICE)
        return values.normal_(0.0, scale, generator=self._generator)

    def warm(self, all_candidates: Iterable[Candidate]) -> None:
        """Compile every tiling, in threads."""

        def compile_one(candidate: Candidate) -> None:
            ids = torch.zeros(1, self.top_k, dtype=torch.int32, device=DEVICE)
            pairs = self._sort(ids, candidate.block_m)
            for gated in (True, False):
                if candidate not in candidates(candidate.block_m, gated=gated):
                    continue
                x = self.down.new_zeros(1 if gated else self.top_k, self._depth(gated))
                try:
                    self._multiply(x, pairs, candidate, gated)
                except (TritonError, RuntimeError) as error:
                    print(f"cannot run {candidate}: {error}")

        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            list(pool.map(compile_one, all_candidates))
        torch.cuda.synchronize()

    def _depth(self, gated: bool) -> int:
        return (self.gate_up if gated else self.down).shape[2]

    def _sort(self, ids: torch.Tensor, block_m: int) -> PairTiles:
        cut = choose_tiles(
            len(ids), num_experts=self.num_experts, top_k=self.top_k, itemsize=DTYPE.itemsize
        )
        return sort_pairs(
            ids, num_experts=self.num_experts, block_m=block_m, chunk=cut.chunk, scan=cut.scan
        )

    def _multiply(
        self, x: torch.Tensor, pairs: PairTiles, candidate: Candidate, gated: bool
    ) -> torch.Tensor:
        block_m, tile = candidate.block_m, candidate.tile
        if gated:
            return multiply(
                x, self.gate_up, pairs, block_m, tile, top_k=self.top_k, activation="silu"
            )
        return multiply(x, self.down, pairs, block_m, tile)

    def run(self, rows: int) -> None:
        """Time one number of tokens and print a block of the table."""
        xs = [self._normal(rows, self.gate_up.shape[2]) for _ in range(VARIED)]
        logits = [self._normal(rows, self.num_experts) for _ in range(VARIED)]
        options = {"top_k": self.top_k, "renormalize": True, "activation": "silu"}
        whole = partial(experts, gate_up=self.gate_up, down=self.down, **options)  # type: ignore[arg-type]
        error = error_of(whole(xs[0], logits[0]), self._reference(xs[0], logits[0]))
        wrong = f"  WRONG: {error:.3g}" if error > MAX_ERROR else ""
        both = list(zip(xs, logits, strict=True))
        whole_s = time_chain(lambda pair: whole(*pair), both, self.stream)
        ids = [route(row, self.top_k, renormalize=True)[0] for row in logits]
        route_s = time_chain(
            lambda row: route(row, self.top_k, renormalize=True), logits, self.stream
        )
        cut = choose_tiles(
            rows, num_experts=self.num_experts, top_k=self.top_k, itemsize=DTYPE.itemsize
        )
        sort_s = time_chain(lambda row: self._sort(row, cut.block_m), ids, self.stream)
        in_use = sum(len(row.unique()) for row in ids) / VARIED
        values = self.gate_up[0].numel() + self.down[0].numel()
        flop = 2 * rows * self.top_k * values
        nbytes = 2 * in_use * values
        floor_s = max(nbytes / READ_BYTES_PER_SECOND, flop / FLOP_PER_SECOND)
        print(
            f"{self.name:14} {rows:5} {whole_s * 1e6:9.1f} {floor_s * 1e6:9.1f}"
            f" {100 * floor_s / whole_s:5.0f}% {nbytes / whole_s / 1e9:6.0f}"
            f" {flop / whole_s / 1e12:6.1f} {route_s * 1e6:6.1f} {sort_s * 1e6:6.1f}{wrong}"
        )
        for gated, now in ((True, cut.gate_up), (False, cut.down)):
            self._try_cuts(rows, xs, ids, Candidate(cut.block_m, now), gated)

    def _reference(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # The routing is the kernel's own: among equal logits its choice may differ from torch's.
        ids, weights = route(logits, self.top_k, renormalize=True)
        activate = partial(TorchOps().gated_activation, activation="silu")
        return run_experts(x, ids.long(), weights, self.gate_up, self.down, activate).float()

    def _try_cuts(
        self,
        rows: int,
        xs: list[torch.Tensor],
        ids: list[torch.Tensor],
        now: Candidate,
        gated: bool,
    ) -> None:
        if not gated:
            xs = [self._normal(rows * self.top_k, self._depth(False)) for _ in xs]
        expected: torch.Tensor | None = None
        times: dict[Candidate, float] = {}
        for block_m in BLOCKS_M[2:] if rows >= MANY_ROWS else BLOCKS_M[:3]:
            pairs = [self._sort(row, block_m) for row in ids]
            items = list(zip(xs, pairs, strict=True))
            for candidate in dict.fromkeys([now, *candidates(block_m, gated=gated)]):
                if candidate.block_m != block_m:
                    continue
                call = partial(self._call, candidate, gated)
                try:
                    out = call(items[0]).float()
                except (TritonError, RuntimeError):
                    continue  # already reported when it was compiled
                expected = out if expected is None else expected
                if (error := error_of(out, expected)) > MAX_ERROR:
                    print(f"  WRONG: {candidate}: {error:.3g}")
                    continue
                times[candidate] = time_chain(call, items, self.stream) * 1e6
        best = sorted(times, key=times.__getitem__)[:3]
        shown = ", ".join(f"{c} {times[c]:.1f}" for c in best)
        name = "gate_up" if gated else "down"
        print(f"    {name:8} now {now} {times.get(now, float('nan')):.1f}; best {shown}")

    def _call(
        self, candidate: Candidate, gated: bool, item: tuple[torch.Tensor, PairTiles]
    ) -> torch.Tensor:
        x, pairs = item
        return self._multiply(x, pairs, candidate, gated)


def main() -> None:
    args = parse_args()
    started = perf_counter()
    everything = dict.fromkeys(
        candidate
        for block_m in BLOCKS_M
        for gated in (True, False)
        for candidate in candidates(block_m, gated=gated)
    )
    print(
        f"{'':14} {'rows':>5} {'us':>9} {'floor us':>9} {'%':>6} {'GB/s':>6} {'TFLOPs':>6}"
        f" {'route':>6} {'sort':>6}"
    )
    for name in args.models:
        mixture = Mixture(name)
        mixture.warm(everything)
        for rows in args.rows:
            mixture.run(rows)
        del mixture
        torch.cuda.empty_cache()
    print(f"{perf_counter() - started:.0f} s on {torch.cuda.get_device_name(DEVICE)}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
