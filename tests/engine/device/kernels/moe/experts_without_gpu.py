"""Compiles the products of experts for GPUs that need not be here, and prints what they take.

A program: the tests' process runs Triton interpreted, which compiles nothing. Argument: a JSON list
of cases, each with `arch` and the sizes below. Prints a JSON list of what each case compiled to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from termgen.engine.device.kernels.compilation import collect_missing
from termgen.engine.device.kernels.moe import experts, float8_experts, group_experts
from termgen.engine.device.kernels.moe.float8_experts import Float8Weights
from termgen.engine.device.kernels.moe.group_experts import GroupWeights

NUM_EXPERTS, TOP_K = 16, 4
SHARED_KIB = {80: 163, 89: 99, 90: 227}
KERNELS = (
    "float8_product_kernel",
    "group_product_kernel",
    "lone_product_kernel",
    "_reorder_kernel",
)

target = GPUTarget("cuda", 90, 32)


class Compiled:
    """A kernel launched as on a GPU."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            return self._kernel[grid](*arguments, **{**options, "USE_PTX": True})

        return launch


def weights(form: str, num_rows: int, num_columns: int) -> Float8Weights | GroupWeights:
    """form: fp8, fp8-blocks, int4, ordered, int8, mxfp4 or nvfp4."""
    num = NUM_EXPERTS
    if form.startswith("fp8"):
        groups = -(-num_columns // 256)
        blocks = torch.zeros(num, -(-num_rows // 16), 2 * groups) if "blocks" in form else None
        words = torch.zeros(num, num_rows, groups * 64, dtype=torch.int32)
        return Float8Weights(words, torch.zeros(num, num_rows), blocks, num_columns)
    bits = 8 if form == "int8" else 4
    groups, rows = -(-num_columns // 32), 32 // bits
    words = torch.zeros(num, num_rows, groups * bits, dtype=torch.int32)
    pair_type = torch.int16 if form == "mxfp4" else torch.int32
    pairs = torch.zeros(num, -(-num_rows // rows), groups, rows, dtype=pair_type)
    orders = torch.zeros(num, num_columns, dtype=torch.int32) if form == "ordered" else None
    return GroupWeights(
        *(words, pairs, torch.zeros(num, num_rows), num_columns, bits),
        is_halved=form == "nvfp4",
        orders=orders,
    )


def made(
    *,
    arch: int,
    form: str,
    num_tokens: int,
    dtype: str = "bfloat16",
    hidden: int = 2048,
    inner: int = 768,
) -> list[dict[str, Any]]:
    global target
    target = GPUTarget("cuda", arch, 32)
    shared = SHARED_KIB[arch] * 1024
    for module in (float8_experts, group_experts):
        module.shared_bytes = lambda device: shared  # type: ignore[attr-defined]
    experts.pdl_options = lambda *_, **__: (  # type: ignore[attr-defined]
        {"USE_PDL": True, "launch_pdl": True} if arch >= 90 else {"USE_PDL": False}
    )
    x = torch.zeros(num_tokens, hidden, dtype=getattr(torch, dtype))
    with collect_missing() as missing:
        experts.experts(
            *(x, torch.zeros(num_tokens, NUM_EXPERTS, dtype=x.dtype)),
            *(weights(form, 2 * inner, hidden), weights(form, hidden, inner)),
            top_k=TOP_K,
            renormalize=True,
            activation="silu",
        )
    found = []
    for (name, _), (kernel, data) in missing.items():
        if name.rpartition(".")[2] not in KERNELS:
            continue
        compiled = kernel.preload(data)
        found.append(
            {
                "kernel": compiled.metadata.name,
                "shared": compiled.metadata.shared,
                "local": ".local" in compiled.asm["ptx"],
                "cubin": compiled.asm["cubin"].hex() if len(sys.argv) > 2 else "",
                "threads": compiled.metadata.num_warps * 32,
            }
        )
    return found


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: target.arch,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    for module, name in (
        (experts, "float8_product_kernel"),
        (experts, "group_product_kernel"),
        (group_experts, "lone_product_kernel"),
    ):
        setattr(module, name, Compiled(getattr(module, name)))
    print(json.dumps([made(**case) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    sys.exit(main())
