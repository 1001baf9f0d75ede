"""Products of a few rows on a CUDA device: cuBLAS beside every candidate of `small_gemm`.

    python benchmarks/gpu_gemm.py [--models NAME ...] [--rows M ...] [--output FILE.py]

A time is that of one product inside a CUDA graph that holds a chain of them over different copies
of the weight, more than the L2 cache keeps. Candidates run as a chain that overlaps (programmatic
dependent launch). What a candidate computes is compared with float32 first: a wrong one is
reported, not timed. FILE.py is the table from which the engine chooses,
termgen/engine/device/kernels/gemm/small_gemm_table.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from machine import print_rows
from triton.runtime.errors import TritonError

from termgen.engine.device.kernels.gemm.small_gemm import SmallGemmWorkspace, small_gemm
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig
from termgen.engine.device.kernels.launch import next_power_of_2

NAMES = ("qkv", "o", "gate_up", "down", "head")
SHAPES = {  # (N, K) of each weight
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
}
ROTATED_BYTES = 120 << 20
CHAIN = 24
LEAST_SECONDS = 2e-3  # of one measurement
MAX_ERROR = 1e-2
TIE = 1.02  # cuBLAS stays unless a candidate beats it by this much
COMPILE_THREADS = 16
DEVICE = torch.device("cuda")
_MAX_GEMV_ROWS = 4
_MIN_MMA_ROWS = 16
_NUM_SMS = 132
_SPLITS = (1, 2, 4, 8, 16)
_MAX_CANDIDATES = 16
_MIN_HELD_ROWS, _MAX_HELD_ROWS = 8, 32
_MAX_HELD_VALUES = 256
"""Values of the weight that a thread moves, at most: what is in flight must be in registers."""
_MAX_WAVES = 4
"""Programs for each multiprocessor up to which most of them start before the kernel ahead ends."""


@dataclass
class Cell:
    """One product and its times, in microseconds."""

    model: str
    name: str
    m: int
    n: int
    k: int
    cublas_us: float = math.nan
    overlapped_us: dict[SmallGemmConfig, float] = field(default_factory=dict)

    @property
    def best(self) -> SmallGemmConfig | None:
        return min(self.overlapped_us, key=self.overlapped_us.__getitem__, default=None)

    @property
    def best_us(self) -> float:
        return min(self.overlapped_us.values(), default=math.nan)

    @property
    def winner(self) -> SmallGemmConfig | None:
        return self.best if self.best_us * TIE < self.cublas_us else None


def candidates(m: int, n: int, k: int, dtype: torch.dtype) -> list[SmallGemmConfig]:
    """Candidates worth timing for this shape, at most a dozen, the likelier ones first."""
    found: list[SmallGemmConfig] = []
    if m <= _MAX_GEMV_ROWS:
        found += _gemv_candidates(next_power_of_2(m), k)
    if dtype.itemsize == 2:
        if m <= _MAX_HELD_ROWS:
            found += _held_candidates(max(_MIN_HELD_ROWS, next_power_of_2(m)), k)
        block_m = max(_MIN_MMA_ROWS, next_power_of_2(m))
        found += _mma_candidates(block_m, n, k, _MAX_CANDIDATES - len(found))
    return [_without_late_prefetch(config, n) for config in found[:_MAX_CANDIDATES]]


def _without_late_prefetch(config: SmallGemmConfig, n: int) -> SmallGemmConfig:
    """A program that starts late loads at once: asking for the same bytes before only costs."""
    programs = config.tiles(n) * config.splits
    if programs > _MAX_WAVES * _NUM_SMS:
        return replace(config, prefetch_bytes=0)
    return config


def _gemv_candidates(block_m: int, k: int) -> list[SmallGemmConfig]:
    shapes = [(4, 1024, 4, 1), (8, 1024, 4, 1)]  # block_n, block_k, num_warps, num_stages
    if k >= 2048:
        shapes += [(4, 2048, 4, 1), (4, 2048, 8, 1), (8, 2048, 8, 1)]
    else:
        shapes += [(2, 1024, 4, 1), (8, 512, 2, 1)]
    if k > 2048:
        shapes += [(4, 1024, 4, 4), (8, 1024, 4, 3), (8, 1024, 4, 4)]
    return [SmallGemmConfig("gemv", block_m, *shape) for shape in shapes]


def _held_candidates(block_m: int, k: int) -> list[SmallGemmConfig]:
    found = []
    for block_n in (16, 32):
        for num_warps in (4, 8):
            values = block_n * k // (32 * num_warps)
            block_k = math.gcd(k // num_warps, 256) if k % num_warps == 0 else 0
            if block_k < 64 or values > _MAX_HELD_VALUES:
                continue
            config = SmallGemmConfig("held", block_m, block_n, block_k, num_warps, prefetch_bytes=0)
            if config.can_run(k):
                found.append(config)
    return found


def _mma_candidates(block_m: int, n: int, k: int, limit: int) -> list[SmallGemmConfig]:
    shapes = {  # block_n, block_k, num_warps, num_stages
        16: [(64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 3), (16, 256, 2, 4), (128, 128, 4, 3)],
        32: [(64, 128, 4, 4), (128, 128, 8, 3), (64, 256, 4, 3), (128, 64, 4, 4), (32, 256, 4, 3)],
        64: [(64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (64, 64, 4, 5), (64, 128, 4, 4)],
    }[block_m]
    firsts: list[SmallGemmConfig] = []
    seconds: list[SmallGemmConfig] = []
    for block_n, block_k, num_warps, num_stages in shapes:
        tiles, steps = -(-n // block_n), -(-k // block_k)
        for place, splits in enumerate(_split_choices(tiles, steps)):
            config = SmallGemmConfig(
                "mma", block_m, block_n, block_k, num_warps, num_stages, splits
            )
            (seconds if place else firsts).append(config)
    return (firsts + seconds)[:limit]


def _split_choices(tiles: int, steps: int) -> list[int]:
    """At most two, by how evenly they load the multiprocessors; of equals, the smaller."""
    most = max(1, min(steps // 2, 4 * _NUM_SMS // tiles))

    def evenness(splits: int) -> float:
        # Every program pays for its own start and for its part of the sum.
        load = -(-tiles * splits // _NUM_SMS) * -(-steps // splits)
        return load + (0.5 if splits > 1 else 0.0) + 0.05 * splits

    return sorted((s for s in _SPLITS if s <= most), key=evenness)[:2]


def make_workspace(configs: Iterable[SmallGemmConfig], n: int) -> SmallGemmWorkspace:
    configs = list(configs)
    return SmallGemmWorkspace(
        DEVICE,
        num_values=max((c.partial_values(n) for c in configs), default=0),
        num_tiles=max((c.tiles(n) for c in configs), default=0),
    )


def compile_all(work: Iterable[tuple[SmallGemmConfig, int]]) -> set[SmallGemmConfig]:
    """Compiles every (configuration, K) in threads; returns the configurations that cannot run."""
    todo = {}
    for config, k in work:
        prefetches = k > config.block_k or config.num_stages > 1
        steps = config.held_steps(k) if config.kind == "held" else 0
        todo[config, k % config.block_k == 0, prefetches, steps] = (config, k)
    broken = set()

    def compile_one(item: tuple[SmallGemmConfig, int]) -> None:
        config, k = item
        n = 16 * config.block_n
        x = torch.zeros(config.block_m, k, dtype=torch.bfloat16, device=DEVICE)
        weight = torch.zeros(n, k, dtype=torch.bfloat16, device=DEVICE)
        try:
            small_gemm(x, weight, config=config, workspace=make_workspace([config], n), pdl=True)
        except (TritonError, RuntimeError) as error:
            print(f"cannot run {describe(config)}: {error}")
            broken.add(config)

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(compile_one, todo.values()))
    torch.cuda.synchronize()
    return broken


def time_chain(
    product: Callable[[torch.Tensor], object],
    copies: list[torch.Tensor],
    stream: torch.cuda.Stream,
    least_calls: int = CHAIN,
) -> float:
    """Seconds of one call in a recorded chain over the copies of what it reads."""
    calls = max(least_calls, len(copies))
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product(copies[0])
        stream.synchronize()
        graph.capture_begin()
        for call in range(calls):
            product(copies[call % len(copies)])
        graph.capture_end()

        def replay(times: int) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / times

        replay(1)
        times = max(1, math.ceil(LEAST_SECONDS / replay(1)))
        seconds = min(replay(times) for _ in range(3))
    return seconds / calls


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Error relative to the largest value; infinite if anything was not written."""
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf


class Shape:
    """Copies of one weight, and the timing of products with it."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        copies = math.ceil(ROTATED_BYTES / (2 * n * k))
        generator = torch.Generator(DEVICE).manual_seed(n + k)
        self.weights = [
            torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE, generator=generator)
            for _ in range(copies)
        ]
        self._whole = self.weights[0].float()
        self.stream = torch.cuda.Stream()

    def run(self, cell: Cell, broken: set[SmallGemmConfig]) -> None:
        x = torch.randn(cell.m, self.k, dtype=torch.bfloat16, device=DEVICE) * self.k**-0.5
        expected = F.linear(x.float(), self._whole)
        out = torch.empty(cell.m, self.n, dtype=torch.bfloat16, device=DEVICE)
        cublas = time_chain(lambda w: torch.mm(x, w.t(), out=out), self.weights, self.stream)
        cell.cublas_us = cublas * 1e6
        tried = [c for c in candidates(cell.m, self.n, self.k, x.dtype) if c not in broken]
        workspace = make_workspace(tried, self.n)
        for config in tried:
            workspace.partial.fill_(math.nan)
            out.fill_(math.nan)
            small_gemm(x, self.weights[0], config=config, workspace=workspace, out=out)
            error = error_of(out, expected)
            if error > MAX_ERROR:
                print(f"WRONG: {cell.model} {cell.name} M={cell.m} {describe(config)}: {error:.3g}")
                workspace.arrivals.zero_()
                continue
            product = partial(small_gemm, x, config=config, workspace=workspace, out=out, pdl=True)
            cell.overlapped_us[config] = time_chain(product, self.weights, self.stream) * 1e6


def describe(config: SmallGemmConfig) -> str:
    return (
        f"{config.kind} {config.block_m}x{config.block_n}x{config.block_k}"
        f" w{config.num_warps} s{config.num_stages} k/{config.splits}"
    )


def write_table(path: Path, cells: list[Cell]) -> None:
    table: dict[tuple[int, int], dict[int, SmallGemmConfig | None]] = {}
    for cell in cells:
        table.setdefault((cell.n, cell.k), {})[cell.m] = cell.winner
    lines = [
        '"""The fastest cuts measured on a Hopper GPU; written by `benchmarks/gpu_gemm.py`."""',
        "",
        "from __future__ import annotations",
        "",
        "from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig, Table",
        "",
        "_C = SmallGemmConfig",
        "",
        "MEASURED: Table = {",
    ]
    for shape, by_rows in table.items():
        lines.append(f"    {shape}: {{")
        for m, config in sorted(by_rows.items()):
            lines.append(f"        {m}: {literal(config)},")
        lines.append("    },")
    path.write_text("\n".join([*lines, "}", ""]))


def literal(config: SmallGemmConfig | None) -> str:
    if config is None:
        return "None"
    kind, *numbers = asdict(config).values()
    return f'_C("{kind}", {", ".join(map(str, numbers))})'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--output", type=Path, help="where to write the table")
    args = parser.parse_args()
    started = perf_counter()
    cells = [
        Cell(model, name, m, n, k)
        for model in args.models
        for name, (n, k) in zip(NAMES, SHAPES[model], strict=True)
        for m in args.rows
    ]
    torch.ones(1, device=DEVICE)
    broken = compile_all(
        (config, cell.k)
        for cell in cells
        for config in candidates(cell.m, cell.n, cell.k, torch.bfloat16)
    )
    print(f"compiled in {perf_counter() - started:.0f} s")
    for n, k in dict.fromkeys((cell.n, cell.k) for cell in cells):
        shape = Shape(n, k)
        for cell in cells:
            if (cell.n, cell.k) == (n, k):
                shape.run(cell, broken)
        del shape
        torch.cuda.empty_cache()
    print_rows(
        {
            "model": cell.model,
            "product": cell.name,
            "rows": cell.m,
            "cuBLAS us": cell.cublas_us,
            "small_gemm us": cell.best_us,
            "best": cell.best and describe(cell.best),
            "chosen": cell.winner is not None,
        }
        for cell in cells
    )
    print(f"{perf_counter() - started:.0f} s on {torch.cuda.get_device_name(DEVICE)}")
    if args.output is not None:
        write_table(args.output, cells)


if __name__ == "__main__":
    main()
