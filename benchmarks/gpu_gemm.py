"""Products of a few rows on a CUDA device: cuBLAS beside every candidate of `small_gemm`.

    python benchmarks/gpu_gemm.py [--models NAME ...] [--float8] [--output FILE.py]

Measures as `termgen tune` does: see termgen/engine/device/kernels/gemm/timing.py. FILE.py is the
table that comes with termgen: gemm/small_gemm_table.py, or float8_table.py with --float8.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from machine import print_rows

from termgen.engine.device.kernels.gemm.candidates import Found, Gpu, candidates_by_rows, search
from termgen.engine.device.kernels.gemm.small_gemm_config import Shape, SmallGemmConfig
from termgen.engine.device.kernels.gemm.timing import Products, describe_config

NAMES = ("qkv", "o", "gate_up", "down", "head")
SHAPES = {  # (N, K) of each weight
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
}
DEVICE = torch.device("cuda", 0)


@dataclass
class Cell:
    """One product and what was found for it."""

    model: str
    name: str
    m: int
    n: int
    k: int
    found: Found


def measure(model: str, gpu: Gpu, is_float8: bool) -> list[Cell]:
    cells = []
    for name, (n, k) in zip(NAMES, SHAPES[model], strict=True):
        shape = Shape(n, k, "fp8" if is_float8 else "half")
        tried = candidates_by_rows(n, k, gpu, shape.weights)
        products = Products(shape, gpu, DEVICE)
        products.compile({config for configs in tried.values() for config in configs})
        for m, configs in tried.items():
            found = search(configs, products.timer(m, configs), gpu.tie)
            cells.append(Cell(model, name, m, n, k, found))
        del products
        torch.cuda.empty_cache()
    return cells


def write_table(path: Path, cells: list[Cell]) -> None:
    table: dict[tuple[int, int], dict[int, SmallGemmConfig | None]] = {}
    for cell in cells:
        table.setdefault((cell.n, cell.k), {})[cell.m] = cell.found.choice
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
    parser.add_argument("--float8", action="store_true", help="weights of 8 bits")
    parser.add_argument("--output", type=Path, help="where to write the table")
    args = parser.parse_args()
    started = perf_counter()
    gpu = Gpu.of(DEVICE)
    cells = [cell for model in args.models for cell in measure(model, gpu, args.float8)]
    print_rows(
        {
            "model": cell.model,
            "product": cell.name,
            "rows": cell.m,
            "cuBLAS us": cell.found.library_seconds * 1e6,
            "small_gemm us": cell.found.seconds * 1e6,
            "best": cell.found.choice and describe_config(cell.found.choice),
        }
        for cell in cells
    )
    print(f"{perf_counter() - started:.0f} s on {gpu.name}")
    if args.output is not None:
        write_table(args.output, cells)


if __name__ == "__main__":
    main()
