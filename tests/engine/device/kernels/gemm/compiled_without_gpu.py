"""Compiles candidates for generations of GPUs that need not be here, and prints for each its kind,
the shared memory that it takes and may have, and the instructions of Hopper in it.

A program: the tests' process runs Triton interpreted, which compiles nothing.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from termgen.engine.device.kernels.compilation import collect_missing
from termgen.engine.device.kernels.gemm import small_gemm as launcher
from termgen.engine.device.kernels.gemm.candidates import Gpu, candidates_by_rows
from termgen.engine.device.kernels.gemm.small_gemm import small_gemm
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig
from termgen.engine.device.kernels.gemm.timing import make_workspace

HOPPER_ONLY = ("griddepcontrol", "cp.async.bulk", "wgmma")
N, K = 1024, 1024
ROWS = (1, 32, 64)
SHARED_KIB = {80: 163, 89: 99, 90: 227}

target = GPUTarget("cuda", 80, 32)


def largest_of_each_kind(gpu: Gpu) -> dict[str, SmallGemmConfig]:
    """Those that take most shared memory, among the candidates for some numbers of rows."""
    tried = candidates_by_rows(N, K, gpu)
    configs = [config for rows in ROWS for config in tried[rows]]

    def size(config: SmallGemmConfig) -> int:
        if config.kind == "held":
            return config.held_bytes(K)
        return config.block_k * (config.block_n + config.block_m) * config.num_stages

    return {config.kind: config for config in sorted(configs, key=size)}


def main() -> None:
    global target
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: target.arch,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    for arch, shared_kib in SHARED_KIB.items():
        if arch >= 90:  # what `pdl_options` gives on such a device
            launcher.pdl_options = lambda *_, **__: {"USE_PDL": True, "launch_pdl": True}
        target = GPUTarget("cuda", arch, 32)
        gpu = Gpu("made up", (arch // 10, arch % 10), 108, 40 << 20, shared_kib * 1024)
        for kind, config in largest_of_each_kind(gpu).items():
            weight = torch.empty(N, K, dtype=torch.bfloat16)
            x = torch.empty(config.block_m, K, dtype=torch.bfloat16)
            workspace = make_workspace([config], N, weight.device)
            with collect_missing() as missing:
                small_gemm(x, weight, config=config, workspace=workspace)
            ((kernel, data),) = missing.values()
            compiled = kernel.preload(data)
            line = {
                "arch": arch,
                "kind": kind,
                "shared": compiled.metadata.shared,
                "has": gpu.shared_bytes,
                "hopper_only": [word for word in HOPPER_ONLY if word in compiled.asm["ptx"]],
            }
            print(json.dumps(line))


if __name__ == "__main__":
    sys.exit(main())
