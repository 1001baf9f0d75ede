"""Times products of one shape on a CUDA device: cuBLAS beside the candidates of `small_gemm`.

A time is that of one product inside a CUDA graph that holds a chain of them over different copies
of the weight, more than the L2 cache keeps. Candidates run as a chain that overlaps (programmatic
dependent launch), where the device can. What a candidate computes is compared with float32 first:
a wrong one is reported, not timed.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime.errors import TritonError

from termgen.engine.device.kernels.gemm.candidates import Gpu
from termgen.engine.device.kernels.gemm.float8_gemm import FLOAT8, float8_gemm, pack, widen
from termgen.engine.device.kernels.gemm.small_gemm import SmallGemmWorkspace, small_gemm
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig

logger = logging.getLogger(__name__)

ROTATED_SHARE = 2.4
"""Bytes of the weight's copies, of those of the L2 cache."""
CHAIN = 24
LEAST_SECONDS = 2e-3
"""Length of one measurement."""
MAX_ERROR = 1e-2
COMPILE_THREADS = 16
_ROWS_AT_ONCE = 8192
"""Rows of the weight that are turned into float32 at a time."""
_LEAST_ROWS = 16
"""Rows of a weight to compile with: its number is then a multiple of 16, as that of most models."""


class Products:
    """Products with copies of one weight [n, k], and their times."""

    def __init__(
        self, n: int, k: int, gpu: Gpu, device: torch.device, *, is_float8: bool = False
    ) -> None:
        """is_float8: by `float8_gemm`; cuBLAS gets numbers that are turned into 16 bits first."""
        self.n, self.k = n, k
        self._scale = torch.full((n,), 0.5, device=device) if is_float8 else None
        self._device = device
        self._unusable: set[SmallGemmConfig] = set()
        generator = torch.Generator(device).manual_seed(n + k)
        self._weights = []
        for _ in range(num_copies(n, k, gpu, 1 if is_float8 else 2)):
            weight = torch.randn(n, k, dtype=torch.bfloat16, device=device, generator=generator)
            self._weights.append(pack(weight.to(FLOAT8)) if is_float8 else weight)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def compile(self, configs: Collection[SmallGemmConfig]) -> None:
        """Compile them in threads; those that cannot run here are not timed later."""
        self._unusable |= compile_all(
            ((config, self.k) for config in configs), self._device, self._scale is not None
        )

    def timer(
        self, rows: int, tried: Collection[SmallGemmConfig]
    ) -> Callable[[SmallGemmConfig | None], float]:
        """A function for the seconds of one product of so many rows: by cuBLAS (None), or by one
        of the configurations; infinite if that one cannot run or is wrong."""
        x = torch.randn(rows, self.k, dtype=torch.bfloat16, device=self._device) * self.k**-0.5
        expected = self._expected(x)
        out = torch.empty(rows, self.n, dtype=torch.bfloat16, device=self._device)
        workspace = make_workspace(tried, self.n, self._device)
        checked: set[SmallGemmConfig] = set()

        def seconds(config: SmallGemmConfig | None) -> float:
            if config is None:
                return self._chain(lambda w: torch.mm(x, self._wide(w).t(), out=out))
            if config in self._unusable:
                return math.inf
            product = self._product(x, config=config, workspace=workspace, out=out)
            try:
                if config not in checked:
                    workspace.partial.fill_(math.nan)
                    out.fill_(math.nan)
                    product(self._weights[0])
                    error = error_of(out, expected)
                    if error > MAX_ERROR:
                        workspace.arrivals.zero_()
                        self._drop(config, f"is wrong for {rows} rows: error {error:.3g}")
                        return math.inf
                    checked.add(config)
                return self._chain(product)
            except TritonError as error:
                self._drop(config, f"cannot run: {error}")
                return math.inf

        return seconds

    def _drop(self, config: SmallGemmConfig, why: str) -> None:
        logger.warning("%s of %d x %d %s", describe_config(config), self.n, self.k, why)
        self._unusable.add(config)

    def _product(self, x: torch.Tensor, **options: Any) -> Callable[[torch.Tensor], object]:
        if (scale := self._scale) is not None:
            return lambda words: float8_gemm(x, words, scale, **options)
        return partial(small_gemm, x, **options)

    def _wide(self, weight: torch.Tensor) -> torch.Tensor:
        """In 16 bits, times its scale; which is exact, the scale being a half."""
        return weight if self._scale is None else widen(weight, self._scale, self.k, torch.bfloat16)

    def _expected(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(self._wide(self._weights[0]), _ROWS_AT_ONCE)
        return torch.cat([F.linear(x.float(), part.float()) for part in parts], dim=1)

    def _chain(self, product: Callable[[torch.Tensor], object]) -> float:
        return time_chain(product, self._weights, self._stream)


def num_copies(n: int, k: int, gpu: Gpu, item_bytes: int = 2) -> int:
    """Copies of a weight [n, k] that the L2 cache does not hold together."""
    return math.ceil(ROTATED_SHARE * gpu.l2_bytes / (item_bytes * n * k))


def make_workspace(
    configs: Iterable[SmallGemmConfig], n: int, device: torch.device
) -> SmallGemmWorkspace:
    configs = list(configs)
    return SmallGemmWorkspace(
        device,
        num_values=max((c.partial_values(n) for c in configs), default=0),
        num_tiles=max((c.tiles(n) for c in configs), default=0),
    )


def compile_all(
    work: Iterable[tuple[SmallGemmConfig, int]], device: torch.device, is_float8: bool = False
) -> set[SmallGemmConfig]:
    """Compile every (configuration, K) in threads; returns the configurations that cannot run."""
    todo = {}
    for config, k in work:
        prefetches = k > config.block_k or config.num_stages > 1
        steps = config.held_steps(k) if config.kind == "held" else 0
        todo[config, k % config.block_k == 0, prefetches, steps] = (config, k)
    broken = set()

    def begin() -> None:
        torch.cuda.set_device(device)  # Triton compiles for the thread's current device

    def compile_one(item: tuple[SmallGemmConfig, int]) -> None:
        config, k = item
        n = max(_LEAST_ROWS, config.block_n)
        x = torch.zeros(config.block_m, k, dtype=torch.bfloat16, device=device)
        weight = torch.zeros(n, k, dtype=FLOAT8 if is_float8 else x.dtype, device=device)
        workspace = make_workspace([config], n, device)
        try:
            if is_float8:
                scale = torch.zeros(n, device=device)
                float8_gemm(x, pack(weight), scale, config=config, workspace=workspace)
            else:
                small_gemm(x, weight, config=config, workspace=workspace)
        except (TritonError, RuntimeError) as error:
            logger.warning("%s cannot run: %s", describe_config(config), error)
            broken.add(config)

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(COMPILE_THREADS, cpus), initializer=begin) as pool:
        list(pool.map(compile_one, todo.values()))
    torch.cuda.synchronize(device)
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
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(times):
                graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / times

        replay(1)
        times = max(1, math.ceil(LEAST_SECONDS / replay(1)))
        seconds = min(replay(times) for _ in range(3))
    return seconds / calls


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Error relative to the largest value; infinite if anything was not written."""
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf


def describe_config(config: SmallGemmConfig) -> str:
    return (
        f"{config.kind} {config.block_m}x{config.block_n}x{config.block_k}"
        f" w{config.num_warps} s{config.num_stages} k/{config.splits}"
    )
