"""A gated MLP's first half on a CUDA device: the fused kernel beside product and activation in two.

    python benchmarks/gpu_gated.py [--models NAME ...] [--rows M ...]

Measures as `gpu_gemm.py` does. "two" is the faster of cuBLAS and the table's choice of
`small_gemm`, each with `silu_mul` behind it.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from gpu_gemm import (
    COMPILE_THREADS,
    DEVICE,
    SHAPES,
    Product,
    Shape,
    describe,
    error_of,
    make_workspace,
    time_chain,
)
from triton.runtime.errors import TritonError

from termgen.engine.kernels.gate_up_silu import gate_up_silu, gate_up_silu_reference
from termgen.engine.kernels.silu_mul import silu_mul
from termgen.engine.kernels.small_gemm import small_gemm
from termgen.engine.kernels.small_gemm_config import SmallGemmConfig, candidates, choose
from termgen.engine.kernels.small_gemm_table import MEASURED

MAX_ERROR = 3e-2
"""Three roundings to bfloat16, against none."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    return args


def fused_candidates(m: int, size: int, k: int) -> list[SmallGemmConfig]:
    found = [replace(config, splits=1) for config in candidates(m, size, k, torch.bfloat16)]
    return list(dict.fromkeys(found))


def compile_all(work: set[tuple[SmallGemmConfig, int]]) -> set[tuple[SmallGemmConfig, int]]:
    """Compiles every (configuration, K); returns those that cannot run."""
    broken = set()

    def compile_one(item: tuple[SmallGemmConfig, int]) -> None:
        config, k = item
        x = torch.zeros(config.block_m, k, dtype=torch.bfloat16, device=DEVICE)
        weight = torch.zeros(32 * config.block_n, k, dtype=torch.bfloat16, device=DEVICE)
        try:
            gate_up_silu(x, weight, config=config)
        except (TritonError, RuntimeError) as error:
            print(f"cannot run {describe(config)}: {error}")
            broken.add(item)

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(compile_one, work))
    torch.cuda.synchronize()
    return broken


def two_kernels(x: torch.Tensor, n: int) -> list[Product]:
    """The product by cuBLAS and, where the table has one, by `small_gemm`; then the activation."""
    product = torch.empty(x.shape[0], n, dtype=x.dtype, device=DEVICE)
    out = torch.empty(x.shape[0], n // 2, dtype=x.dtype, device=DEVICE)
    ways: list[Product] = [lambda w: silu_mul(torch.mm(x, w.t(), out=product), out=out)]
    config = choose(x.shape[0], n, x.shape[1], x.dtype, DEVICE, MEASURED)
    if config is not None:
        workspace = make_workspace([config], n)
        ways.append(
            lambda w: silu_mul(
                small_gemm(x, w, config=config, workspace=workspace, out=product), out=out
            )
        )
    return ways


def run(shape: Shape, m: int, broken: set[tuple[SmallGemmConfig, int]]) -> str:
    """One row of the table."""
    n, k, size = shape.n, shape.k, shape.n // 2
    x = torch.randn(m, k, dtype=torch.bfloat16, device=DEVICE) * k**-0.5
    two = min(time_chain(way, shape.weights, shape.stream) for way in two_kernels(x, n))
    expected = gate_up_silu_reference(x.float(), shape.weights[0].float())
    out = torch.empty(m, size, dtype=torch.bfloat16, device=DEVICE)
    times = {}
    for config in fused_candidates(m, size, k):
        if (config, k) in broken:
            continue
        out.fill_(math.nan)
        gate_up_silu(x, shape.weights[0], config=config, out=out)
        error = error_of(out, expected)
        if error > MAX_ERROR:
            print(f"WRONG: [{n}, {k}] M={m} {describe(config)}: {error:.3g}")
            continue

        def fused(w: torch.Tensor, config: SmallGemmConfig = config) -> object:
            return gate_up_silu(x, w, config=config, out=out)

        times[config] = time_chain(fused, shape.weights, shape.stream)
    if not times:
        return f"{m:3}{two * 1e6:9.2f}        -"
    best = min(times, key=times.__getitem__)
    gain = two / times[best]
    return f"{m:3}{two * 1e6:9.2f}{times[best] * 1e6:9.2f}{gain:6.2f}  {describe(best)}"


def main() -> None:
    args = parse_args()
    torch.ones(1, device=DEVICE)
    shapes = {model: SHAPES[model]["gate_up"] for model in args.models}
    broken = compile_all(
        {
            (config, k)
            for n, k in shapes.values()
            for m in args.rows
            for config in fused_candidates(m, n // 2, k)
        }
    )
    print(f"{'':14}{'M':>3}{'two':>9}{'fused':>9}{'gain':>6}  best")
    for model, (n, k) in shapes.items():
        shape = Shape(n, k)
        for m in args.rows:
            print(f"{model:14}{run(shape, m, broken)}")
        del shape


if __name__ == "__main__":
    main()
