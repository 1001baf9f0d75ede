"""Times products of one shape on a CUDA device: cuBLAS beside the candidates of `small_gemm`, or of
the kernels for weights that are not in 16 bits, which cuBLAS gets widened.

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
from typing import TypeVar

import torch
from triton.runtime.errors import TritonError

from termgen.engine.device.kernels.gemm.candidates import Gpu
from termgen.engine.device.kernels.gemm.small_gemm import SmallGemmWorkspace
from termgen.engine.device.kernels.gemm.small_gemm_config import Shape, SmallGemmConfig, Weights
from termgen.engine.device.kernels.gemm.timed_weights import FORMS, Weight

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
Copy = TypeVar("Copy")
_LEAST_ROWS = 16
"""Rows of a weight to compile with: its number is then a multiple of 16, as that of most models."""


class Products:
    """Products with copies of one weight, and their times."""

    def __init__(self, shape: Shape, gpu: Gpu, device: torch.device) -> None:
        self.shape = shape
        self._form = FORMS[shape.weights]
        self._device = device
        self._unusable: set[SmallGemmConfig] = set()
        n, k, _ = shape
        generator = torch.Generator(device).manual_seed(n + k)
        copies = num_copies(n, k, gpu, self._form.item_bytes)
        self._weights = [self._form.make(n, k, generator) for _ in range(copies)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def compile(self, configs: Collection[SmallGemmConfig]) -> None:
        """Compile them in threads; those that cannot run here are not timed later."""
        work = ((config, self.shape.k) for config in configs)
        self._unusable |= compile_all(work, self._device, self.shape.weights)

    def timer(
        self, rows: int, tried: Collection[SmallGemmConfig]
    ) -> Callable[[SmallGemmConfig | None], float]:
        """A function for the seconds of one product of so many rows: by cuBLAS (None), or by one
        of the configurations; infinite if that one cannot run or is wrong."""
        n, k, _ = self.shape
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=self._device) * k**-0.5
        expected = self._expected(x)
        out = torch.empty(rows, n, dtype=torch.bfloat16, device=self._device)
        workspace = make_workspace(tried, n, self._device)
        checked: set[SmallGemmConfig] = set()

        def seconds(config: SmallGemmConfig | None) -> float:
            if config is None:
                return self._chain(lambda weight: self._form.multiply_wide(x, weight, out))
            if config in self._unusable:
                return math.inf

            def product(weight: Weight) -> None:
                self._form.multiply(x, weight, config=config, workspace=workspace, out=out)

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
        logger.warning("%s of %s %s", describe_config(config), self.shape, why)
        self._unusable.add(config)

    def _expected(self, x: torch.Tensor) -> torch.Tensor:
        n, k, _ = self.shape
        parts = []
        for first in range(0, n, _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, n))
            parts.append(x.float() @ self._form.widen(self._weights[0], rows, k).float().T)
        return torch.cat(parts, dim=1)

    def _chain(self, product: Callable[[Weight], object]) -> float:
        return time_chain(product, self._weights, self._stream)


def num_copies(n: int, k: int, gpu: Gpu, item_bytes: float = 2) -> int:
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
    work: Iterable[tuple[SmallGemmConfig, int]], device: torch.device, weights: Weights = "half"
) -> set[SmallGemmConfig]:
    """Compile every (configuration, K) in threads; returns the configurations that cannot run."""
    todo, form = {}, FORMS[weights]
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
        weight = form.make(n, k, torch.Generator(device))
        workspace = make_workspace([config], n, device)
        try:
            form.multiply(x, weight, config=config, workspace=workspace)
        except (TritonError, RuntimeError) as error:
            logger.warning("%s cannot run: %s", describe_config(config), error)
            broken.add(config)

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(COMPILE_THREADS, cpus), initializer=begin) as pool:
        list(pool.map(compile_one, todo.values()))
    torch.cuda.synchronize(device)
    return broken


def time_chain(
    product: Callable[[Copy], object],
    copies: list[Copy],
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
